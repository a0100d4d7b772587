-- Stores a page, once, if its partition has room. KEYS: value, index, sizes, use.
-- ARGV: the value, its member, bytes the partition may hold, time to live (ms), now (ms).
-- Returns stored, exists or full, and the bytes the partition then holds.
local value, index, sizes, use = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local data, member, room, ttl, now = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]

local function account(used)
  local told = redis.pcall('MEMORY', 'USAGE', value)  -- with what the allocator adds, which may be a fifth
  local size = type(told) == 'number' and told or #data + 128
  redis.call('HSET', sizes, member, size)
  redis.call('SET', use, string.format('%.0f', used + size))
  return used + size
end

-- A size without a value is that of one that expired.
local known = tonumber(redis.call('HGET', sizes, member) or '0')
local used = tonumber(redis.call('GET', use) or '0')
if redis.call('EXISTS', value) == 1 then
  if redis.call('PTTL', value) < ttl then redis.call('PEXPIRE', value, ttl) end
  if known == 0 then used = account(used) end
  redis.call('ZADD', index, 'GT', now, member)
  return {'exists', used}
end
used = math.max(used - known, 0)
if used + #data > room then return {'full', used} end
redis.call('SET', value, data, 'PX', ttl)  -- the first write: where the server is full it changes nothing
used = account(used)
redis.call('ZADD', index, 'GT', now, member)
return {'stored', used}
