-- Removes requests to erase pages, if the caller has the lease. KEYS: the lease, the requests. ARGV: the caller, then members.
-- Returns 1, or 0 if the caller does not have the lease; then nothing was removed.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #ARGV do redis.call('LREM', KEYS[2], 1, ARGV[i]) end
return 1
