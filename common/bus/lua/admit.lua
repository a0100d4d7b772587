-- Admits jobs to lanes that can hold them and finish them in time: all jobs or none. The jobs are one load, which goes as a
-- whole into the first lane with room for it; with `spread` each job is a load of its own.
-- KEYS use workers plan | lane per class | own lane of the preferred worker or '' | heart per worker | job per job
--   | with a session: its record, turns and jobs, and the record of the job that is `busy` (if any)
-- ARGV router tenant deadline replay_of full_share share traceparent('' none) rule order spread own hop_s waits came(0 now)
--   | n class.. | preferred value_s | n worker.. | n {id payload items tokens view('' none)}..
--   | session ('' none) [version busy origin]
-- rule: finish (the predicted end decides), count (items against the workers' depth in queries), or all (for probes)
-- order: first (the classes as given) or turns (each admission begins with the next class)
-- waits: 1 if a caller that is refused waits to be notified of room
-- came: when the request came (ms), from which the lane's objective counts
-- own: 1 if the deadline is the request's own, which then decides instead of the lane's objective
local use, workers, plan = key(), key(), key()
local router, tenant, deadline, replay_of, full_share, share = arg(), arg(), num(), arg(), num(), num()
local traceparent, rule, order, spread, own, hop_s = arg(), arg(), arg(), arg() == '1', arg() == '1', num()
local waits, came = arg() == '1', num()
local classes, alive, jobs = {}, {}, {}

-- Returns why a job may not have a session's next turn, or nil. The turn lock is held while the record of the `busy` job
-- says queued or running, so no end of a job has to free it.
local function turn_refused(s, id, tenant)
  local f = fields(s.key, 'tenant', 'deleted', 'version', 'busy')
  if f[1] ~= tenant or f[2] then return 'session_not_found' end
  local busy = f[4] or ''
  if busy ~= '' and busy ~= id then
    if busy ~= s.busy then return 'session_moved' end -- not the job that the caller read: the caller reads it again
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
local loads, existing = {}, nil
for i = 1, num() do
  local j = {id = arg(), payload = arg(), items = num(), tokens = num(), view = arg(), key = key()}
  local lane = call('HGET', j.key, 'lane')
  if lane then existing = lane else
    jobs[#jobs + 1] = j
    if spread or #loads == 0 then loads[#loads + 1] = {items = 0, tokens = 0, jobs = {}} end
    local load = loads[#loads]
    load.items, load.tokens = load.items + j.items, load.tokens + j.tokens
    load.jobs[#load.jobs + 1] = j
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
local admits = call('HINCRBY', use, 'admits', 1) -- allocates, so a full Redis refuses it before anything has changed
-- Workers' heartbeats note how full Redis is: INFO would cost more than the rest of this script.
local memory = tonumber(call('HGET', use, 'memory') or '0')
local function no_room(why, retry_s)
  if waits then call('HSET', use, 'waits', 1) end
  return {'refused', '', why, tostring(retry_s), 0, 0, 0, 0}
end
if memory > 1000 * full_share then return no_room('bus_full', 5) end
local now = now_ms()
local reason, retry = 'deadline', 1
if now > deadline then return {'refused', '', 'deadline', '0', 0, 0, 0, 0} end

-- Returns the state of a lane, with the loads placed so far.
local lanes, all = {}, living(workers, alive, now)
local function lane_of(class, name)
  local l = lanes[class]
  if not l then
    l = capacity(all, class, now)
    l.class, l.name, l.hop, l.tail = class, name, hop_s, tail_of(plan, class)
    l.held_items, l.held_tokens = held(use, class, l)
    lanes[class] = l
  end
  return l
end

-- Returns the time by which a lane must end a load. An empty lane takes one job whatever its objective.
local function due_of(l)
  if own or l.slo == 0 or l.held_items == 0 then return deadline end
  return math.min(deadline, (came > 0 and came or now) + l.slo * 1000 * share)
end

-- Returns the place that a load would have in a lane, or nil, with the reason in `reason` and `retry`.
local function spot(l, load)
  local part = l.held_items > 0 and share or 1 -- an empty lane takes one job however small the share
  if rule == 'all' then return {number = 0, finish = 0, due = deadline} end
  if rule == 'count' then
    local over = l.held_items + load.items - l.queries * part
    if over > 0 then
      reason, retry = 'depth', l.b + l.ai * over + l.at * over * load.tokens / load.items
      return nil
    end
    return {number = 0, finish = 0, due = deadline}
  end
  local over_items, over_tokens = l.held_items + load.items - l.items * part, l.held_tokens + load.tokens - l.tokens * part
  if over_items > 0 or over_tokens > 0 then
    reason = over_tokens > 0 and over_items <= 0 and 'tokens' or 'depth'
    retry = l.b + (l.ai * math.max(over_items, 0) + l.at * math.max(over_tokens, 0)) / math.max(l.n, 1)
    return nil
  end
  local due = due_of(l)
  local p = place(l, l.tail, load.items, load.tokens, due, now)
  local late = now + safe(l, p.finish) * 1000 - due
  if late > 0 then reason, retry = 'deadline', late / 1000; return nil end
  p.due = due - hop_s * 1000 -- when the worker must have ended it, so that the client has it by `due`
  return p
end

local function put(l, load, p)
  load.lane, load.place = l, p
  l.held_items, l.held_tokens = l.held_items + load.items, l.held_tokens + load.tokens
  l.tail = p.tail or l.tail
end

-- Returns the preferred worker's own lane. Jobs that this worker has leased from the shared lane `l` go first, so they
-- count as held; each counts with the mean size of the shared lane's jobs.
local function own_of(l)
  local class = 'w.' .. preferred
  if lanes[class] then return lanes[class] end
  local mine, told = lane_of(class, own_lane), redis.pcall('XPENDING', l.name, GROUP)
  for _, who in ipairs(not told.err and told[4] or {}) do
    if who[1] == preferred then
      local taken = math.min(tonumber(who[2]), l.held_items)
      mine.held_tokens = mine.held_tokens + taken * l.held_tokens / math.max(l.held_items, 1)
      mine.held_items = mine.held_items + taken
    end
  end
  return mine
end

-- Puts a load into the preferred worker's own lane if it would end there at most `value_s` later than in the shared lane
-- `l`; returns whether it did.
local function prefers(l, load)
  if not own_lane or l.held_items + load.items > l.items or l.held_tokens + load.tokens > l.tokens then return false end
  local mine = own_of(l)
  if mine.n == 0 then return false end
  local here, there = place(mine, mine.tail, load.items, load.tokens, deadline, now), place(l, l.tail, load.items, load.tokens, deadline, now)
  local p = here.finish <= there.finish + value_s and spot(mine, load)
  if p then put(mine, load, p) end
  return p
end

local function fits(load)
  local live = false
  for i = 0, #classes - 1 do
    local c = classes[(order == 'turns' and (admits + i) % #classes or i) + 1]
    local l = lane_of(c.name, c.lane)
    if l.n > 0 then
      live = true
      if prefers(l, load) then return true end
      local p = spot(l, load)
      if p then put(l, load, p); return true end
    end
  end
  if not live then reason, retry = 'no_worker', 2 end
  return false
end

for _, load in ipairs(loads) do
  if not fits(load) then return no_room(reason, retry) end
end
for _, load in ipairs(loads) do
  local l, p = load.lane, load.place
  local due, finish = string.format('%.0f', p.due), string.format('%.0f', rule == 'finish' and now + p.finish * 1000 or 0)
  for _, j in ipairs(load.jobs) do
    local entry = call('XADD', l.name, '*', 'j', j.id, 'p', j.payload, 'i', j.items, 'n', j.tokens, 'd', deadline, 'r', router,
      's', 0, 'b', p.number, 'u', due, 'f', finish, unpack(traceparent ~= '' and {'t', traceparent} or {}))
    call('HSET', j.key, 'state', 'queued', 'tenant', tenant, 'lane', l.class, 'entry', entry, 'items', j.items, 'tokens',
      j.tokens, 'deadline', deadline, 'created', now, 'router', router, 'next', 0, 'replay_of', replay_of)
    if traceparent ~= '' then call('HSET', j.key, 'traceparent', traceparent) end
    if j.view ~= '' then call('HSET', j.key, 'view', j.view) end
  end
  add_use(use, l.class, load.items, load.tokens)
end
for class, l in pairs(lanes) do
  if l.limit_items > 0 and l.tail.number > 0 then keep_tail(plan, class, l.tail) end
end
if s then take_turn(s, jobs[1].id, deadline) end
local l = loads[1].lane
local depth_items = rule == 'count' and l.queries or l.items
return {'admitted', l.class, '', '0', l.held_items, l.held_tokens, depth_items, math.max(l.tokens, rule == 'count' and l.held_tokens or 0)}
