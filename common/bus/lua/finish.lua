-- Ends jobs with results or final errors: log, journal, entry and use in one step, fenced by lease and epoch.
-- KEYS use | {job log lane journal} per job    ARGV worker | n {id entry epoch router index kind event}..
-- Returns per job: verdict (ok|done|cancelled|fenced|early|gap:<the log's length>) and the router to ring by now;
-- early: a job cannot expire before its deadline has passed by this clock.
local use = key()
open_door(use)
local worker, out = arg(), {}
for _ = 1, num() do
  local id, entry, epoch, router, index, kind, event = arg(), arg(), num(), arg(), num(), arg(), arg()
  local k = {use = use, job = key(), log = key(), lane = key(), journal = key()}
  local f = fields(k.job, 'cancelled', 'router', 'ended_by', 'next', 'deadline')
  local mark = worker .. ' ' .. entry .. ' ' .. epoch
  local verdict = 'ok'
  if f[3] == mark then verdict = 'done' -- the reply to an earlier try was lost
  elseif not f[4] or lease(k.lane, entry, worker) ~= epoch then verdict = 'fenced'
  elseif f[1] then
    end_job(k, id, 'cancelled', nil, 'cancelled', 'the request was cancelled')
    verdict = 'cancelled'
  elseif kind == 'expired' and tonumber(f[5]) > now_ms() then verdict = 'early'
  elseif index ~= tonumber(f[4]) then verdict = 'gap:' .. f[4]
  else
    end_job(k, id, kind, event)
  end
  if verdict == 'ok' or verdict == 'cancelled' then call('HSET', k.job, 'ended_by', mark) end
  out[#out + 1] = verdict
  out[#out + 1] = f[2] or router
end
return out
