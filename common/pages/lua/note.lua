-- Sets a value, on a full server as well. KEYS: the key. ARGV: the value.
redis.call('PERSIST', KEYS[1])  -- a full server refuses no write of a script that has written already
return redis.call('SET', KEYS[1], ARGV[1])
