-- Merges writes of another stream into a shard's stream, under their own ids; writes that are there already stay.
-- KEYS writes      ARGV (id write)...
local writes = key()

local function parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

local function before(a, b)
  local a_ms, a_seq = parts(a)
  local b_ms, b_seq = parts(b)
  if a_ms ~= b_ms then return a_ms < b_ms end
  return a_seq < b_seq
end

local newest = call('XREVRANGE', writes, '+', '-', 'COUNT', 1)[1]
local last, early, added = newest and newest[1], {}, 0
while at < #ARGV do
  local id, write = arg(), arg()
  if not last or before(last, id) then
    call('XADD', writes, id, 'w', write)
    last, added = id, added + 1
  elseif #call('XRANGE', writes, id, id) == 0 then
    early[#early + 1] = {id, write}
  end
end
if #early > 0 then -- newer writes came first: the stream is written anew, in order
  local kept = call('XRANGE', writes, '-', '+')
  call('DEL', writes)
  local next_early = 1
  for _, row in ipairs(kept) do
    while early[next_early] and before(early[next_early][1], row[1]) do
      call('XADD', writes, early[next_early][1], 'w', early[next_early][2])
      next_early = next_early + 1
    end
    call('XADD', writes, row[1], unpack(row[2]))
  end
end
return added + #early
