-- Moves unread entries from one lane to another whose workers have room for them now; with `sooner`, only those that would
-- end earlier there.
-- KEYS use workers plan heart(caller) source target | heart per worker | job per entry | room
-- ARGV source_class target_class sooner | n worker.. | n {id entry}..
local use, workers, plan, heart, source, target = key(), key(), key(), key(), key(), key()
open_door(use)
local source_class, target_class, sooner, alive, out = arg(), arg(), arg() == '1', {}, {}
for _ = 1, num() do alive[arg()] = key() end
if call('EXISTS', heart) == 0 then return out end
local now = now_ms()
local all = living(workers, alive, now)
local function lane(class)
  local l = capacity(all, class, now)
  l.held_items, l.held_tokens = held(use, class, l)
  l.tail, l.hop = tail_of(plan, class), 0
  return l
end
local here, there = lane(source_class), lane(target_class)
local before_items, before_tokens = here.run_items, here.run_tokens -- work that goes before the entry in its present lane
for _ = 1, num() do
  local id, entry, job = arg(), arg(), key()
  local e = call('XRANGE', source, entry, entry)
  if #e > 0 and not owner(source, entry) and call('HGET', job, 'entry') == entry then
    local v, items, tokens, due = e[1][2], 0, 0, 0
    for i = 1, #v, 2 do
      if v[i] == 'i' then items = tonumber(v[i + 1]) elseif v[i] == 'n' then tokens = tonumber(v[i + 1])
      elseif v[i] == 'u' then due = tonumber(v[i + 1]) end
    end
    if there.held_items + items > there.items or there.held_tokens + tokens > there.tokens then break end
    local p = place(there, there.tail, items, tokens, due, now)
    if sooner and here.n > 0 then
      local ahead = here.ai * math.max(0, before_items - here.run_items) + here.at * math.max(0, before_tokens - here.run_tokens)
      if p.finish >= (here.remaining + ahead) / here.n + seconds(here, items, tokens) then break end
    end
    there.held_items, there.held_tokens, there.tail = there.held_items + items, there.held_tokens + tokens, p.tail or there.tail
    for i = 1, #v, 2 do
      if v[i] == 'b' then v[i + 1] = p.number elseif v[i] == 'f' then v[i + 1] = string.format('%.0f', now + p.finish * 1000) end
    end
    drop_entry(use, source, source_class, entry, items, tokens)
    local new = call('XADD', target, '*', unpack(v))
    add_use(use, target_class, items, tokens)
    call('HSET', job, 'lane', target_class, 'entry', new)
    out[#out + 1] = id
  end
end
if there.limit_items > 0 and there.tail.number > 0 then keep_tail(plan, target_class, there.tail) end
return out
