-- Deletes a lock if it is still its owner's. KEYS: the lock. ARGV: the owner. Returns how many were deleted.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
