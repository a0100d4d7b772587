-- Adds requests to erase pages from disk, unless too many requests wait already.
-- KEYS: the list of requests. ARGV: how many may wait, then members.
-- Returns how many wait now, or -1 if nothing was added.
if redis.call('LLEN', KEYS[1]) >= tonumber(ARGV[1]) then return -1 end
redis.call('PERSIST', KEYS[1])  -- a full server refuses no write of a script that has written already
return redis.call('RPUSH', KEYS[1], unpack(ARGV, 2))
