-- Ends jobs with results or final errors: log, notification, entry and use in one step, fenced by lease and epoch.
-- A job that is a session's turn is appended to the session in the same step, if the session still waits for it.
-- KEYS use | {job log lane journal [session turns jobs index]} per job | room
-- ARGV worker | n {id entry epoch router index kind event session [version turn partial tokens fingerprint]}..
-- Returns per job: verdict (ok|done|cancelled|deleted|changed|fenced|early|gap:<the log's length>) and the router to
-- notify. early: by Redis' clock the job's deadline has not passed, so the job cannot expire. deleted, changed: the
-- session was deleted or has gone on; the job ended with that error instead of its result.
local use = key()
open_door(use)
local worker, out = arg(), {}
local LOST = {
  deleted = 'the session was deleted, or has expired, before its turn ended',
  changed = 'the session has gone on without this turn',
}

local function lost(s, id)
  local f = fields(s.key, 'version', 'busy', 'deleted')
  if not f[1] or f[3] then return 'deleted' end
  if f[1] ~= s.version or f[2] ~= id then return 'changed' end
  return nil
end

local function append(s, turn)
  local now = now_ms()
  call('RPUSH', s.turns, turn)
  call('HSET', s.key, 'version', tonumber(s.version) + 1, 'tokens', s.tokens, 'updated', now, 'busy', '')
  call('HINCRBY', s.key, 'turns', 1)
  if s.fingerprint ~= '' then call('HSET', s.key, 'fingerprint', s.fingerprint) end
  call('ZADD', s.index, now, s.id)
  live_for(s, tonumber(call('HGET', s.key, 'ttl')) * 1000)
end

for _ = 1, num() do
  local id, entry, epoch, router, index, kind, event = arg(), arg(), num(), arg(), num(), arg(), arg()
  local k = {use = use, job = key(), log = key(), lane = key(), journal = key()}
  local s = {id = arg()}
  if s.id ~= '' then
    s.key, s.turns, s.jobs, s.index = key(), key(), key(), key()
    s.version, s.turn, s.partial, s.tokens, s.fingerprint = arg(), arg(), arg(), arg(), arg()
  else s = nil end
  local f = fields(k.job, 'cancelled', 'router', 'ended_by', 'next', 'deadline', 'state', 'trail')
  local mark = worker .. ' ' .. entry .. ' ' .. epoch
  local verdict = 'ok'
  local held, since = lease(k.lane, entry, worker)
  if f[3] == mark then verdict = 'done' -- the reply to an earlier try was lost
  elseif not f[4] or held ~= epoch then verdict = 'fenced'
  elseif not f[1] and kind == 'expired' and tonumber(f[5]) > now_ms() then verdict = 'early'
  elseif not f[1] and index ~= tonumber(f[4]) then verdict = 'gap:' .. f[4]
  else
    local why = s and lost(s, id)
    if f[1] then
      verdict = 'cancelled'
      end_job(k, id, 'cancelled', nil, 'cancelled', 'the request was cancelled')
    elseif why and kind == 'result' then
      verdict = why
      end_job(k, id, 'error', nil, 'session_' .. why, LOST[why])
    else
      end_job(k, id, kind, event)
    end
    if s and not why then
      if verdict == 'ok' and kind == 'result' then append(s, s.turn)
      elseif s.partial ~= '' then append(s, s.partial) end
    end
    call('HSET', k.job, 'ended_by', mark)
    if f[6] == 'queued' then -- the job emitted nothing, so its lease is not in the trail yet
      call('HSET', k.job, 'trail', trail(f[7], 'leased', worker, now_ms() - since))
    end
  end
  out[#out + 1] = verdict
  out[#out + 1] = f[2] or router
end
return out
