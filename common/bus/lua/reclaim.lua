-- Takes leases from a consumer that cannot use them. Modes:
--   settle  a dead worker's leases: each charged one suspicion, then to `returned` (or convicted, or ended)
--   return  the caller's own leases, handed over: charges nothing
--   take    entries of `returned` for the caller, who must be alive
-- A worker's own lane has no other reader, so its entries move to the shared lane instead.
-- KEYS use dead letters heart(of from; of the caller when taking) lane shared | {job log journal} per entry | room
-- ARGV mode from caller class shared_class idle | n {id entry unread}..
-- Returns per entry: id and verdict (returned|moved|taken:<epoch>:<alone>|waits|cancelled|expired|dead|bad|not).
local use, dead, letters, heart, lane, shared = key(), key(), key(), key(), key(), key()
open_door(use)
local mode, from, caller, class, shared_class, idle = arg(), arg(), arg(), arg(), arg(), arg() == '1'
local out, now, uncounted = {}, now_ms(), false
if mode == 'settle' and call('EXISTS', heart) == 1 then return {'alive'} end
if mode == 'take' and call('EXISTS', heart) == 0 then return {'gone'} end
local own = lane ~= shared

local function to_shared(k, entry, fresh)
  local e = call('XRANGE', lane, entry, entry)
  if #e == 0 then return 'not' end
  local v, items, tokens, known = e[1][2], 0, 0, false
  for i = 1, #v, 2 do
    known = known or v[i] == 'l'
    if v[i] == 'i' then items = tonumber(v[i + 1]) elseif v[i] == 'n' then tokens = tonumber(v[i + 1]) end
    if v[i] == 's' then v[i + 1] = call('HGET', k.job, 'suspicions') or 0 end
    if v[i] == 'b' or v[i] == 'f' then v[i + 1] = 0 end -- no batch is planned, no end predicted in the shared lane
  end
  drop_entry(use, lane, class, entry, items, tokens)
  if not known then v[#v + 1] = 'l'; v[#v + 1] = 1 end -- a worker may have logged events of the job
  local id = call('XADD', shared, '*', unpack(v))
  add_use(use, shared_class, items, tokens)
  call('HSET', k.job, 'lane', shared_class, 'entry', id, 'state', 'queued')
  return 'moved'
end

-- Adds to the job's trail that a lease has ended, for a lease that its worker did not end itself.
local function note(k, entry)
  local f = fields(k.job, 'state', 'trail')
  local line = f[2]
  if f[1] == 'queued' then
    local _, since = lease(lane, entry, from)
    line = trail(line, 'leased', from, now - since)
  end
  call('HSET', k.job, 'trail', trail(line, mode == 'settle' and 'lost' or 'returned', from, now))
end

local function charge(k)
  call('HINCRBY', k.job, 'attempts', 1)
  call('HINCRBY', k.job, 'suspicions', 1)
  if call('HGET', k.job, 'alone') == from then
    if call('HINCRBY', k.job, 'alone_deaths', 1) >= 3 then return true end
  end
  return false
end

local function one(k, id, entry, unread)
  local holder = owner(lane, entry)
  if unread then
    if not own or holder or #call('XRANGE', lane, entry, entry) == 0 then return 'not' end
  elseif holder ~= from then return 'not' end
  local f = fields(k.job, 'cancelled', 'deadline', 'suspicions', 'entry')
  if f[4] ~= entry then return convict(k, class, id, entry, NO_JOB) and 'bad' or 'not' end
  if f[1] then
    end_job(k, id, 'cancelled', nil, 'cancelled', 'the request was cancelled')
    return 'cancelled'
  elseif tonumber(f[2]) < now then
    end_job(k, id, 'expired', nil, 'deadline_exceeded', 'the deadline passed before the job ran')
    return 'expired'
  end
  if mode == 'take' then
    local alone = tonumber(f[3] or '0') >= 2
    if alone and not idle then return 'waits' end
    call('XCLAIM', lane, GROUP, caller, 0, entry)
    if alone then call('HSET', k.job, 'alone', caller) end
    idle = false
    return 'taken:' .. lease(lane, entry, caller) .. ':' .. (alone and '1' or '0')
  end
  if not unread then note(k, entry) end
  if mode == 'settle' and not unread and charge(k) then
    bury(k, id, 'job_failed', 'the job was running alone each of 3 times its worker died', '')
    return 'dead'
  end
  call('HDEL', k.job, 'alone')
  if own then return to_shared(k, entry) end
  call('XCLAIM', lane, GROUP, RETURNED, 0, entry, 'JUSTID')
  call('HSET', k.job, 'state', 'queued')
  return 'returned'
end

for _ = 1, num() do
  local id, entry, unread = arg(), arg(), arg() == '1'
  local k = {use = use, dead = dead, letters = letters, lane = lane, job = key(), log = key(), journal = key()}
  local verdict = one(k, id, entry, unread)
  out[#out + 1] = id
  out[#out + 1] = verdict
  uncounted = uncounted or verdict == 'bad'
  if mode == 'take' and string.sub(verdict, -2) == ':1' then break end
end
if uncounted then recount(use, lane, class) end
return out
