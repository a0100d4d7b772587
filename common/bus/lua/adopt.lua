-- Sends the notifications of a job to another router; a record that is gone is not created again.
-- KEYS job      ARGV router      Returns 1, or 0 if the job has no record.
local job, router = key(), arg()
if call('EXISTS', job) == 0 then return 0 end
call('HSET', job, 'router', router)
return 1
