-- Removes values and their entries in index, sizes and counts. KEYS: index, sizes, use, shares, disk, then each value.
-- ARGV: per value its member, and when its new copy on disk expires (ms), or '' if its entry for the disk does not change.
-- Returns how many values there were, and the bytes that were counted for them.
local index, sizes, use, shares, disk = unpack(KEYS, 1, 5)
local gone, freed, by_owner = 0, 0, {}
for i = 6, #KEYS do
  local member, until_ms = ARGV[2 * i - 11], ARGV[2 * i - 10]
  gone = gone + redis.call('UNLINK', KEYS[i])
  redis.call('ZREM', index, member)
  local size, owner = string.match(redis.call('HGET', sizes, member) or '', '^(%d+) ?(.*)$')
  size, owner = size or '0', owner or ''
  freed, by_owner[owner] = freed + tonumber(size), (by_owner[owner] or 0) + tonumber(size)
  redis.call('HDEL', sizes, member)
  if until_ms ~= '' then redis.call('HSET', disk, member, until_ms) end
end
local used = tonumber(redis.call('GET', use) or '0')
redis.call('SET', use, string.format('%.0f', math.max(used - freed, 0)))
for owner, bytes in pairs(by_owner) do
  local left = tonumber(redis.call('HGET', shares, owner) or '0') - bytes
  if left > 0 then redis.call('HSET', shares, owner, string.format('%.0f', left)) else redis.call('HDEL', shares, owner) end
end
return {gone, freed}
