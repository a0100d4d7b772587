-- Asks for pages to be erased from disk, unless too many wait for that already.
-- KEYS: the list of those that wait. ARGV: how many that may be, then members.
-- Returns how many wait now, or -1 where nothing was added.
if redis.call('LLEN', KEYS[1]) >= tonumber(ARGV[1]) then return -1 end
redis.call('PERSIST', KEYS[1])  -- a full server refuses no write of a script that has written already
return redis.call('RPUSH', KEYS[1], unpack(ARGV, 2))
