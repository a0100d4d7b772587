-- Shared by every script: time, leases, use, and the one way a job ends. KEYS and ARGV are read in order by key() and arg().
local GROUP, RETURNED = 'workers', 'returned'
local KEEP_MS = 600000      -- a log lives until deadline + 10 minutes
local INLINE = 4096         -- bytes; the notification of a larger event does not contain it
local TRACE_MS = 86400000   -- a session's list of jobs lives a day longer than the session
local TRAIL = 4096          -- bytes; a longer trail gets no more lines
local PIECE, PAYLOAD = 512, 4096 -- bytes that a dead letter keeps of one field of a bad entry, and of all its fields
local NO_JOB = 'no job was admitted with this entry'
local RINGS = 20000         -- notifications kept; a router further behind reads the logs instead
local at, ak = 0, 0
local function arg() at = at + 1; return ARGV[at] end
local function num() return tonumber(arg()) end
local function key() ak = ak + 1; return KEYS[ak] end
local function call(...) return redis.call(...) end

-- Begins a script with a write that a full Redis does not refuse. After it the script may allocate, so running work can
-- always end.
local function open_door(use) call('HDEL', use, '-') end

local function now_ms()
  local t = call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function fields(k, ...)
  return call('HMGET', k, ...)
end

-- Returns the delivery count (the epoch) of an entry that `consumer` holds and the milliseconds since its delivery, or nil.
local function lease(lane, entry, consumer)
  local p = redis.pcall('XPENDING', lane, GROUP, entry, entry, 1, consumer)
  if p.err or #p == 0 then return nil end
  return tonumber(p[1][4]), tonumber(p[1][3])
end

-- Returns a job's trail with one more line: a lease was taken (leased), lost (its worker died) or returned.
local function trail(before, what, worker, at)
  before = before or ''
  if #before > TRAIL then return before end
  return before .. what .. ' ' .. worker .. ' ' .. string.format('%.0f', at) .. '\n'
end

local function owner(lane, entry)
  local p = redis.pcall('XPENDING', lane, GROUP, entry, entry, 1)
  if p.err or #p == 0 then return nil end
  return p[1][2]
end

local function add_use(use, class, items, tokens)
  call('HINCRBY', use, class .. ':items', items)
  call('HINCRBY', use, class .. ':tokens', tokens)
end

-- Wakes the routers that wait for room in the family's lanes. A refused admission sets `waits` in `use`, so that nothing is
-- written while no router waits. The stream that routers read for this is the last key of every script that makes room.
local function wake_waiting(use)
  if call('HDEL', use, 'waits') == 0 then return end
  call('XADD', KEYS[#KEYS], 'MAXLEN', 1, '*', 'r', '')
  call('PEXPIRE', KEYS[#KEYS], 60000)
end

local function drop_entry(use, lane, class, entry, items, tokens)
  redis.pcall('XACK', lane, GROUP, entry)
  -- `0 - x`, as Redis to 7.0 sends -x as "-0" where x is 0, which HINCRBY refuses
  if call('XDEL', lane, entry) == 1 then
    add_use(use, class, 0 - items, 0 - tokens)
    wake_waiting(use)
  end
end

local function ring(journal, job, index, event)
  local oldest = string.format('%.0f', now_ms() - 60000)
  call('XADD', journal, 'MINID', '~', oldest, '*', 'j', job, 'i', index, 'e', #event <= INLINE and event or '')
  call('XTRIM', journal, 'MAXLEN', '~', RINGS)
  call('PEXPIRE', journal, 60000)
end

-- Names a job in its family's inbox, which its worker reads: there is a message to the job, or the job was cancelled.
local function tell(inbox, job)
  call('XADD', inbox, 'MAXLEN', '~', RINGS, '*', 'j', job)
  call('PEXPIRE', inbox, 60000)
end

-- Returns an event that a script makes itself. STATUS maps codes to HTTP statuses; common/bus/scripts.py puts it before
-- this file. The code of the error for which a job is convicted may be missing in it.
local function made_event(index, kind, code, message)
  local details = {status = STATUS[code] or STATUS.job_failed}
  return cmsgpack.pack({v = 1, index = index, kind = kind, code = code, message = message, error = details})
end

-- Ends a job: event, notification, entry, use, state and time to live in one step. Returns false if the job is over already.
local function end_job(k, job, kind, event, code, message)
  local f = fields(k.job, 'lane', 'entry', 'items', 'tokens', 'deadline', 'next', 'state')
  if f[7] ~= 'queued' and f[7] ~= 'running' then return false end
  local index = tonumber(f[6] or '0')
  event = event or made_event(index, kind, code, message)
  call('RPUSH', k.log, event)
  if k.journal ~= '' then ring(k.journal, job, index, event) end
  drop_entry(k.use, k.lane, f[1], f[2], tonumber(f[3]), tonumber(f[4]))
  call('HSET', k.job, 'state', kind, 'next', index + 1, 'ended', now_ms())
  local at_ms = math.max(tonumber(f[5]), now_ms()) + KEEP_MS
  call('PEXPIREAT', k.job, at_ms)
  call('PEXPIREAT', k.log, at_ms)
  return true
end

-- Adds a dead letter to the index, which maps each job to the entries of its letters, most often one.
local function index_letter(letters, job, entry)
  local known = call('HGET', letters, job)
  if not known then call('HSET', letters, job, entry)
  elseif not string.find(' ' .. known .. ' ', ' ' .. entry .. ' ', 1, true) then
    call('HSET', letters, job, known .. ' ' .. entry)
  end
end

local function bury(k, job, code, message, trace)
  local f = fields(k.job, 'entry', 'tenant', 'items', 'tokens', 'attempts')
  local e = call('XRANGE', k.lane, f[1], f[1])
  local payload = ''
  if #e > 0 then
    for i = 1, #e[1][2], 2 do if e[1][2][i] == 'p' then payload = e[1][2][i + 1] end end
  end
  local id = call('XADD', k.dead, '*', 'job', job, 'tenant', f[2], 'payload', payload, 'items', f[3], 'tokens', f[4],
    'code', code, 'message', message, 'trace', trace, 'attempts', f[5] or '1', 'at', now_ms())
  index_letter(k.letters, job, id)
  call('HSET', k.job, 'letter', id)
  end_job(k, job, 'dead', nil, code, message)
end

-- Returns a count in an entry as the workers read it: up to 15 digits; any other text is 0.
local function count(text)
  if #text <= 15 and string.match(text, '^%d+$') then return tonumber(text) end
  return 0
end

-- Returns the items and tokens of all entries of a lane.
local function held_in(lane)
  local items, tokens = 0, 0
  for _, e in ipairs(call('XRANGE', lane, '-', '+')) do
    for n = 1, #e[2], 2 do
      if e[2][n] == 'i' then items = items + count(e[2][n + 1]) end
      if e[2][n] == 'n' then tokens = tokens + count(e[2][n + 1]) end
    end
  end
  return items, tokens
end

-- Convicts an entry that is no job: the entry leaves its lane, and its fields, cut short, become a dead letter. A job that
-- was admitted with this entry ends. Whether the lane's use counts the entry is not known, so the caller then calls
-- `recount`, once for all entries, since it reads the whole lane.
local function convict(k, class, id, entry, message)
  local e = call('XRANGE', k.lane, entry, entry)
  redis.pcall('XACK', k.lane, GROUP, entry)
  if #e == 0 then return false end
  local kept, room = {}, PAYLOAD
  for _, part in ipairs(e[1][2]) do
    local piece = string.sub(part, 1, math.min(PIECE, room))
    room = room - #piece
    kept[#kept + 1] = piece
    if room <= 0 then break end
  end
  local f = fields(k.job, 'entry', 'lane', 'tenant')
  local its = f[1] == entry and f[2] == class
  local letter = call('XADD', k.dead, '*', 'job', id, 'tenant', its and f[3] or '', 'payload', cmsgpack.pack(kept), 'items', 0,
    'tokens', 0, 'code', 'bad_entry', 'message', message, 'trace', '', 'attempts', 0, 'at', now_ms())
  index_letter(k.letters, id, letter)
  if its then
    call('HSET', k.job, 'letter', letter)
    end_job(k, id, 'dead', nil, 'bad_entry', message)
  end
  call('XDEL', k.lane, entry)
  return true
end

-- Counts the use of a lane anew, from its entries.
local function recount(use, lane, class)
  local items, tokens = held_in(lane)
  call('HSET', use, class .. ':items', items, class .. ':tokens', tokens)
  wake_waiting(use)
end

local function use_of(use, class)
  local f = fields(use, class .. ':items', class .. ':tokens')
  return tonumber(f[1] or '0'), tonumber(f[2] or '0')
end

local function live_for(s, ms)
  call('PEXPIRE', s.key, ms)
  call('PEXPIRE', s.turns, ms)
  call('PEXPIRE', s.jobs, ms + TRACE_MS)
end
