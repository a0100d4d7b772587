-- Takes a lock that nobody has, or renews it for who has it. KEYS: the lock. ARGV: the owner, for how long (ms).
-- Returns 2 if it was taken, 1 if it was renewed, 0 if another has it.
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
if holder then return 0 end
redis.call('DEL', KEYS[1])  -- a full server refuses no write of a script that has written already
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 2
