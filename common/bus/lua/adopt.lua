-- Makes a router the one whose journal rings for a job; the record of a job that is gone is not made anew.
-- KEYS job      ARGV router      Returns 1, or 0 if there is no such job (any more).
local job, router = key(), arg()
if call('EXISTS', job) == 0 then return 0 end
call('HSET', job, 'router', router)
return 1
