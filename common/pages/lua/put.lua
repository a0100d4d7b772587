-- Stores a page, once, if its partition and its owner have room. KEYS: value, index, sizes, use, shares, limits.
-- ARGV: the value, its member, bytes the partition may hold, time to live (ms), now (ms), its owner ('' none).
-- Returns stored, exists, over (its owner's limit) or full, then the bytes that the partition holds, the bytes of the
-- owner among them, and the owner's limit (-1: none).
local value, index, sizes, use, shares, limits = unpack(KEYS)
local data, member, room, ttl, now = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local owner = ARGV[6]

local function set(name, field, bytes)
  if field then redis.call('HSET', name, field, string.format('%.0f', bytes))
  else redis.call('SET', name, string.format('%.0f', bytes)) end
end

-- If there is a size and no value, the value has expired.
local known = tonumber(string.match(redis.call('HGET', sizes, member) or '0', '^%d+'))
local used = tonumber(redis.call('GET', use) or '0')
local share = tonumber(redis.call('HGET', shares, owner) or '0')
local limit = tonumber(redis.call('HGET', limits, owner) or '-1')

local function account()
  local told = redis.pcall('MEMORY', 'USAGE', value)  -- the allocator's overhead included, up to a fifth
  local size = type(told) == 'number' and told or #data + 128
  redis.call('HSET', sizes, member, size .. ' ' .. owner)
  used, share = used + size, share + size
  set(use, nil, used)
  set(shares, owner, share)
end

if redis.call('EXISTS', value) == 1 then
  if redis.call('PTTL', value) < ttl then redis.call('PEXPIRE', value, ttl) end
  if known == 0 then account() end
  redis.call('ZADD', index, 'GT', now, member)
  return {'exists', used, share, limit}
end
used, share = math.max(used - known, 0), math.max(share - known, 0)
if limit >= 0 and share + #data > limit then return {'over', used, share, limit} end
if used + #data > room then return {'full', used, share, limit} end
redis.call('SET', value, data, 'PX', ttl)  -- the first write: a full server refuses it, and nothing has changed
account()
redis.call('ZADD', index, 'GT', now, member)
return {'stored', used, share, limit}
