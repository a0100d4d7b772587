-- Admits all jobs to the first lane that can hold them and finish them in time, or none.
-- KEYS use workers | lane per class | own lane of the preferred worker or '' | heart per worker | job per job
--   | with a session: its record, turns and jobs, and the record of the job that is `busy` (if any)
-- ARGV router tenant deadline replay_of full_share share traceparent('' none) | n class.. | preferred value_s | n worker.. | n {id payload items tokens view('' none)}..
--   | session ('' none) [version busy origin]
local use, workers = key(), key()
local router, tenant, deadline, replay_of, full_share, share = arg(), arg(), num(), arg(), num(), num()
local traceparent = arg()
local classes, alive, jobs = {}, {}, {}

-- Why a job may not have a session's next turn, or nil. The lock is held while the busy job's record says so, hence no
-- way in which a job may end has to free it.
local function turn_refused(s, id, tenant)
  local f = fields(s.key, 'tenant', 'deleted', 'version', 'busy')
  if f[1] ~= tenant or f[2] then return 'session_not_found' end
  local busy = f[4] or ''
  if busy ~= '' and busy ~= id then
    if busy ~= s.busy then return 'session_moved' end -- another than the caller has read: to be read again
    local state = call('HGET', s.busy_job, 'state')
    if state == 'queued' or state == 'running' then return 'session_busy' end
  end
  if f[3] ~= s.version then return 'session_changed' end
  return nil
end

local function take_turn(s, id, deadline)
  call('HSET', s.key, 'busy', id)
  call('HSET', s.jobs, id, s.origin)
  local left, least = call('PTTL', s.key), deadline + KEEP_MS - now_ms()
  if left >= 0 then live_for(s, math.max(left, least)) end -- a session outlives its turn
end
for i = 1, num() do classes[i] = {name = arg(), lane = key()} end
local preferred, value_s = arg(), num()
local own_lane = preferred ~= '' and key() or nil
for i = 1, num() do alive[arg()] = key() end
local items, tokens, existing = 0, 0, nil
for i = 1, num() do
  local j = {id = arg(), payload = arg(), items = num(), tokens = num(), view = arg(), key = key()}
  local lane = call('HGET', j.key, 'lane')
  if lane then existing = lane else
    jobs[#jobs + 1] = j
    items, tokens = items + j.items, tokens + j.tokens
  end
end
local s = nil
if arg() ~= '' then
  s = {key = key(), turns = key(), jobs = key(), version = arg(), busy = arg(), origin = arg()}
  if s.busy ~= '' then s.busy_job = key() end
end
if #jobs == 0 then return {'exists', existing, '', '0', 0, 0, 0, 0} end
if s then
  local why = turn_refused(s, jobs[1].id, tenant)
  if why then return {'refused', '', why, '1', 0, 0, 0, 0} end
end
call('HINCRBY', use, 'admits', 1) -- allocates: a full Redis refuses here, before anything is done
local info = call('INFO', 'memory')
local max = tonumber(string.match(info, '\nmaxmemory:(%d+)') or '0')
if max > 0 and tonumber(string.match(info, 'used_memory:(%d+)')) > max * full_share then
  return {'refused', '', 'bus_full', '5', 0, 0, 0, 0}
end
local now = now_ms()
local reason, retry, live = 'deadline', 1, false
local function predicted(cap, held_items, held_tokens)
  local n = math.max(cap.n, 1)
  return cap.b + (cap.ai * (held_items + items) + cap.at * (held_tokens + tokens)) / n
end
local function try(class, lane, cap, held_items, held_tokens)
  local part = held_items > 0 and share or 1 -- an empty lane takes one job however small the share
  local over_items, over_tokens = held_items + items - cap.items * part, held_tokens + tokens - cap.tokens * part
  if over_items > 0 or over_tokens > 0 then
    reason = over_tokens > 0 and over_items <= 0 and 'tokens' or 'depth'
    retry = cap.b + (cap.ai * math.max(over_items, 0) + cap.at * math.max(over_tokens, 0)) / math.max(cap.n, 1)
    return nil
  end
  local eta = predicted(cap, held_items, held_tokens)
  if now + eta * 1000 > deadline then reason, retry = 'deadline', eta; return nil end
  for _, j in ipairs(jobs) do
    local entry = call('XADD', lane, '*', 'j', j.id, 'p', j.payload, 'i', j.items, 'n', j.tokens,
      'd', deadline, 'r', router, 's', 0, unpack(traceparent ~= '' and {'t', traceparent} or {}))
    call('HSET', j.key, 'state', 'queued', 'tenant', tenant, 'lane', class, 'entry', entry, 'items', j.items, 'tokens',
      j.tokens, 'deadline', deadline, 'created', now, 'router', router, 'next', 0, 'replay_of', replay_of)
    if traceparent ~= '' then call('HSET', j.key, 'traceparent', traceparent) end
    if j.view ~= '' then call('HSET', j.key, 'view', j.view) end
  end
  add_use(use, class, items, tokens)
  if s then take_turn(s, jobs[1].id, deadline) end
  return {'admitted', class, '', '0', held_items + items, held_tokens + tokens, cap.items, cap.tokens}
end
if now > deadline then return {'refused', '', 'deadline', '0', 0, 0, 0, 0} end
for _, c in ipairs(classes) do
  local cap = capacity(workers, alive, c.name)
  if cap.n > 0 then
    live = true
    local held_items, held_tokens = held(use, c.name, cap)
    if own_lane then
      local mine = capacity(workers, alive, c.name, preferred)
      if mine.n > 0 and held_items + items <= cap.items and held_tokens + tokens <= cap.tokens then
        local i, t = use_of(use, 'w.' .. preferred)
        if predicted(mine, i, t) <= predicted(cap, held_items, held_tokens) + value_s then
          local done = try('w.' .. preferred, own_lane, mine, i, t)
          if done then return done end
        end
      end
    end
    local done = try(c.name, c.lane, cap, held_items, held_tokens)
    if done then return done end
  end
end
if not live then reason, retry = 'no_worker', 2 end
return {'refused', '', reason, tostring(retry), 0, 0, 0, 0}
