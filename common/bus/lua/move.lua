-- Moves unread entries from one lane to another whose workers have room for them now.
-- KEYS use workers heart(caller) source target | heart per worker | job per entry
-- ARGV source_class target_class | n worker.. | n {id entry}..
local use, workers, heart, source, target = key(), key(), key(), key(), key()
open_door(use)
local source_class, target_class, alive, out = arg(), arg(), {}, {}
for _ = 1, num() do alive[arg()] = key() end
if call('EXISTS', heart) == 0 then return out end
local cap = capacity(workers, alive, target_class)
local held_items, held_tokens = held(use, target_class, cap)
for _ = 1, num() do
  local id, entry, job = arg(), arg(), key()
  local e = call('XRANGE', source, entry, entry)
  if #e > 0 and not owner(source, entry) and call('HGET', job, 'entry') == entry then
    local v, items, tokens = e[1][2], 0, 0
    for i = 1, #v, 2 do
      if v[i] == 'i' then items = tonumber(v[i + 1]) elseif v[i] == 'n' then tokens = tonumber(v[i + 1]) end
    end
    if held_items + items > cap.items or held_tokens + tokens > cap.tokens then break end
    held_items, held_tokens = held_items + items, held_tokens + tokens
    drop_entry(use, source, source_class, entry, items, tokens)
    local new = call('XADD', target, '*', unpack(v))
    add_use(use, target_class, items, tokens)
    call('HSET', job, 'lane', target_class, 'entry', new)
    out[#out + 1] = id
  end
end
return out
