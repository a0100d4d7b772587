-- Notes that a replica holds a shard, and the last write it has applied; wakes the routers that wait for a replica.
-- KEYS use applied room      ARGV replica entry
local use, applied = key(), key()
local replica, entry = arg(), arg()
call('HSET', applied, replica, entry)
wake_waiting(use)
return 1
