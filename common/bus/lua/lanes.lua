-- The capacity of lanes, and when a job would end in one, for the scripts that put jobs into lanes. common/cost/finish.py
-- has the same arithmetic and explains it.

local HALF_S, OTHERS, FITTED = 2, 1, 0.5 -- as in common/cost/slowdown.py
local LEAST = 0.05 -- as in common/cost/finish.py

-- Returns what the living workers publish: their record, and the batch they run with what earlier ones say of their speed.
-- `alive` maps a worker's name to its heartbeat key, whose value is
-- "<until, ms> <batch> <items> <tokens> <log of the slowdown, thousandths> <its weight, thousandths>".
local function living(workers, alive, now)
  local found = {}
  for name, heart in pairs(alive) do
    local doing = call('GET', heart)
    local packed = doing and call('HGET', workers, name)
    if packed then
      local w = {name = name, record = cmsgpack.unpack(packed), log = 0, weight = 0}
      w.machine = string.match(w.record.place or '', '/([^/ ]+)/') or name
      local till, batch, items, tokens, log, weight = string.match(doing, '^(%d+) (%d+) (%d+) (%d+) (%-?%d+) (%d+)$')
      if till then
        w.till, w.batch, w.items, w.tokens = tonumber(till), tonumber(batch), tonumber(items), tonumber(tokens)
        w.log, w.weight = tonumber(log) / 1000, tonumber(weight) / 1000
        w.weight = w.weight * 0.5 ^ (math.max(0, now - w.till) / 1000 / HALF_S)
      end
      found[#found + 1] = w
    end
  end
  return found
end

-- Returns the factor by which a worker's batches take longer now than fitted, by its own and its machine's latest batches.
local function slowdown(all, w)
  local log, weight, theirs, sum = w.weight * w.log, w.weight, 0, 0
  for _, other in ipairs(all) do
    if other ~= w and other.machine == w.machine then
      theirs, sum = theirs + other.weight, sum + other.weight * other.log
    end
  end
  if theirs > 0 then
    local taken = math.min(OTHERS, theirs)
    log, weight = log + taken * sum / theirs, weight + taken
  end
  return math.exp(log / (weight + FITTED))
end

-- Returns the capacity of a class: the sum over its workers that do not drain, of all that live. A closed worker serves its
-- own lane only. A batch that should be over needs as long again as it is late, at most as long as it was predicted to need.
local function capacity(all, class, now)
  local c = {items = 0, tokens = 0, queries = 0, n = 0, ai = 0, at = 0, b = 0, own = {}, remaining = 0, run_items = 0,
    run_tokens = 0, began = 0, limit_items = 0, limit_tokens = 0, late = 0, late_share = 0, slo = 0}
  for _, each in ipairs(all) do
    local w, own = each.record, 'w.' .. each.name
    local serves = not w.draining and own == class
    if not w.draining and not w.closed then
      for _, x in ipairs(w.classes) do if x == class then serves = true end end
    end
    if serves then
      local factor = slowdown(all, each)
      c.items, c.tokens, c.n = c.items + w.depth_items, c.tokens + w.depth_tokens, c.n + 1
      c.queries = c.queries + (w.depth_queries or 0)
      c.ai, c.at, c.b = c.ai + w.alpha_items_s * factor, c.at + w.alpha_tokens_s * factor, c.b + w.beta_s * factor
      c.limit_items = math.max(c.limit_items, w.limit_items or 0)
      c.limit_tokens = math.max(c.limit_tokens, w.limit_tokens or 0)
      c.slo = math.max(c.slo, w.slo_s or 0)
      for _, x in ipairs(all) do -- what made one lane of a machine late makes the others late, too
        if x.machine == each.machine then
          c.late = math.max(c.late, x.record.late_s or 0)
          c.late_share = math.max(c.late_share, x.record.late_share or 0)
        end
      end
      if class ~= own then c.own[#c.own + 1] = each.name end
      if each.till then
        local left_s = (each.till - now) / 1000
        if left_s < 0 and w.limit_items and w.limit_items > 0 then
          local needs_s = factor * (w.beta_s + w.alpha_items_s * each.items + w.alpha_tokens_s * each.tokens)
          left_s = math.min(-left_s, needs_s)
        end
        c.remaining = c.remaining + math.max(0, left_s)
        c.began = math.max(c.began, each.batch)
        c.run_items, c.run_tokens = c.run_items + each.items, c.run_tokens + each.tokens
      end
    end
  end
  if c.n > 0 then c.ai, c.at, c.b = c.ai / c.n, c.at / c.n, c.b / c.n end
  return c
end

-- Returns the items and tokens that a class holds, in its shared lane and in its live workers' own lanes.
local function held(use, class, cap)
  local items, tokens = use_of(use, class)
  for _, name in ipairs(cap.own) do
    local i, t = use_of(use, 'w.' .. name)
    items, tokens = items + i, tokens + t
  end
  return items, tokens
end

-- Returns the last planned batch of a lane; `began` is the latest batch known to have begun, even on a worker that is gone.
local function tail_of(plan, class)
  local line = call('HGET', plan, class) or ''
  local number, items, tokens, due, began = string.match(line, '^(%d+) (%d+) (%d+) (%d+) (%d+)$')
  return {number = tonumber(number or '0'), items = tonumber(items or '0'), tokens = tonumber(tokens or '0'),
    due = tonumber(due or '0'), began = tonumber(began or '0')}
end

local function keep_tail(plan, class, t)
  call('HSET', plan, class, string.format('%.0f %.0f %.0f %.0f %.0f', t.number, t.items, t.tokens, t.due, t.began))
  call('PEXPIRE', plan, KEEP_MS)
end

local function seconds(c, items, tokens) return c.b + c.ai * items + c.at * tokens end

local function batches(c, items, tokens)
  return math.max(math.ceil(items / c.limit_items), math.ceil(tokens / c.limit_tokens))
end

-- Returns `finish` plus two margins: the time to the client, and the error of predictions.
local function safe(c, finish)
  return finish + c.hop + math.min(c.late, LEAST * c.slo + c.late_share * finish)
end

-- Returns the place of a job that is due at `due` (ms): its batch, its predicted end (seconds from now), and the lane's new
-- tail.
local function place(c, tail, items, tokens, due, now)
  local n, began = math.max(c.n, 1), math.max(c.began, tail.began)
  local ahead_items, ahead_tokens = math.max(0, c.held_items - c.run_items), math.max(0, c.held_tokens - c.run_tokens)
  if c.limit_items == 0 then -- no batches are planned here
    local start = (c.remaining + c.ai * ahead_items + c.at * ahead_tokens) / n
    return {number = 0, finish = start + seconds(c, items, tokens)}
  end
  local waits = tail.items > 0 and tail.number > began and ahead_items >= tail.items and ahead_tokens >= tail.tokens
  local between
  if waits then
    ahead_items, ahead_tokens = ahead_items - tail.items, ahead_tokens - tail.tokens
    between = math.min(tail.number - began - 1, ahead_items)
  else between = batches(c, ahead_items, ahead_tokens) end
  local start = (c.remaining + c.ai * ahead_items + c.at * ahead_tokens + c.b * between) / n
  if waits then
    local all_items, all_tokens, first = tail.items + items, tail.tokens + tokens, math.min(tail.due, due)
    local finish = start + seconds(c, all_items, all_tokens)
    if all_items <= c.limit_items and all_tokens <= c.limit_tokens and now + safe(c, finish) * 1000 <= first then
      return {number = tail.number, finish = finish,
        tail = {number = tail.number, items = all_items, tokens = all_tokens, due = first, began = began}}
    end
    start = start + seconds(c, tail.items, tail.tokens) / n
  end
  local number = math.max(tail.number, began) + 1
  local finish = start + seconds(c, items, tokens) + c.b * (batches(c, items, tokens) - 1)
  return {number = number, finish = finish,
    tail = {number = number, items = items, tokens = tokens, due = due, began = began}}
end
