-- Charges a job with an error that it raised: the job goes to `returned` for another try, or becomes a dead letter.
-- KEYS use dead letters job log lane journal room     ARGV worker id entry epoch code message trace max_errors class
local k = {use = key(), dead = key(), letters = key(), job = key(), log = key(), lane = key(), journal = key()}
open_door(k.use)
local worker, id, entry, epoch, code, message, trace, max_errors, class =
  arg(), arg(), arg(), num(), arg(), arg(), arg(), num(), arg()
local mark = worker .. ' ' .. entry .. ' ' .. epoch
if call('HGET', k.job, 'failed_by') == mark then return 'done' end
local held, since = lease(k.lane, entry, worker)
if held ~= epoch then return 'fenced' end
if call('HGET', k.job, 'entry') ~= entry then
  if convict(k, class, id, entry, NO_JOB) then recount(k.use, k.lane, class) end
  return 'bad'
end
local f = fields(k.job, 'state', 'trail')
local line = f[2]
if f[1] == 'queued' then line = trail(line, 'leased', worker, now_ms() - since) end
call('HSET', k.job, 'failed_by', mark, 'trail', trail(line, 'returned', worker, now_ms()))
if call('HGET', k.job, 'cancelled') then
  end_job(k, id, 'cancelled', nil, 'cancelled', 'the request was cancelled')
  return 'cancelled'
end
call('HINCRBY', k.job, 'attempts', 1)
if call('HINCRBY', k.job, 'errors', 1) >= max_errors then
  bury(k, id, code, message, trace)
  return 'dead'
end
call('HDEL', k.job, 'alone')
call('HSET', k.job, 'state', 'queued')
call('XCLAIM', k.lane, GROUP, RETURNED, 0, entry, 'JUSTID')
return 'returned'
