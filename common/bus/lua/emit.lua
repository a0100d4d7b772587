-- Writes the events of one step of a worker, at most one for each job, fenced by lease, epoch and index.
-- `doing` is the batch that the worker runs from now on; it becomes the value of the heartbeat, which lanes.lua reads.
-- KEYS use heart | {job log lane journal} per job
-- ARGV worker doing('' as before) | n {id entry epoch router index kind event fold}..
-- Returns per job: verdict (ok|cancelled|fenced|gap) and the router to notify from now on.
local use, heart = key(), key()
open_door(use)
local worker, doing, out = arg(), arg(), {}
if doing ~= '' then call('SET', heart, doing, 'KEEPTTL', 'XX') end
for _ = 1, num() do
  local id, entry, epoch, router = arg(), arg(), num(), arg()
  local index, _, event, fold = num(), arg(), arg(), arg()
  local job, log, lane, journal = key(), key(), key(), key()
  local f = fields(job, 'cancelled', 'next', 'router', 'state', 'trail')
  local verdict = 'ok'
  local held, since = lease(lane, entry, worker)
  if held ~= epoch or not f[2] then verdict = 'fenced' -- without `next` no job was admitted with this id
  elseif f[1] then verdict = 'cancelled'
  else
    if f[4] == 'queued' then
      call('HSET', job, 'state', 'running', 'trail', trail(f[5], 'leased', worker, now_ms() - since))
    end
    if index >= 0 then
      local next_index = tonumber(f[2])
      if index == next_index then
        if fold == '1' then call('DEL', log) end
        call('RPUSH', log, event)
        call('HSET', job, 'next', index + 1)
        if index == 0 then call('HSET', job, 'first', now_ms()) end
        call('HDEL', job, 'suspicions', 'alone', 'alone_deaths')
        ring(journal, id, index, event)
      elseif index ~= next_index - 1 or call('LINDEX', log, -1) ~= event then
        verdict = 'gap'
      end
    end
  end
  out[#out + 1] = verdict
  out[#out + 1] = f[3] or router
end
return out
