-- Notes what a replica has applied of a shard that it holds from now on, and wakes the routers that wait for one.
-- KEYS use applied room      ARGV replica entry
local use, applied = key(), key()
local replica, entry = arg(), arg()
call('HSET', applied, replica, entry)
wake_waiting(use)
return 1
