-- Removes values with all that names them. KEYS: index, sizes, use, disk, then each value.
-- ARGV: per value its member, and when its copy on disk expires (ms), or '' if what is known of the disk stays.
-- Returns how many values there were, and the bytes that were counted for them.
local index, sizes, use, disk = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local gone, freed = 0, 0
for i = 5, #KEYS do
  local member, until_ms = ARGV[2 * i - 9], ARGV[2 * i - 8]
  gone = gone + redis.call('UNLINK', KEYS[i])
  redis.call('ZREM', index, member)
  freed = freed + tonumber(redis.call('HGET', sizes, member) or '0')
  redis.call('HDEL', sizes, member)
  if until_ms ~= '' then redis.call('HSET', disk, member, until_ms) end
end
local used = tonumber(redis.call('GET', use) or '0')
redis.call('SET', use, string.format('%.0f', math.max(used - freed, 0)))
return {gone, freed}
