-- Cancels a job: one that no worker holds is removed, any other is flagged in its record for its worker's next step.
-- KEYS use job log lane journal inbox room      ARGV id class
local k = {use = key(), job = key(), log = key(), lane = key(), journal = key()}
local inbox = key()
open_door(k.use)
local id, class = arg(), arg()
local f = fields(k.job, 'state', 'lane', 'entry')
if not f[1] then return 'unknown' end
if f[1] ~= 'queued' and f[1] ~= 'running' then return 'over' end
if f[2] ~= class then return 'moved' end
local holder = owner(k.lane, f[3])
if not holder or holder == RETURNED then
  end_job(k, id, 'cancelled', nil, 'cancelled', 'the request was cancelled')
  return 'removed'
end
call('HSET', k.job, 'cancelled', 1)
tell(inbox, id)
return 'flagged'
