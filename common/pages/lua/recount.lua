-- Counts a partition's bytes anew, and forgets sizes of members that are not in the index, and the reverse.
-- KEYS: index, sizes, use. Returns the bytes, by how much they had been wrong, and how many members were forgotten.
local index, sizes, use = KEYS[1], KEYS[2], KEYS[3]
local told = tonumber(redis.call('GET', use) or '0')
local all, total, forgotten = redis.call('HGETALL', sizes), 0, 0
for i = 1, #all, 2 do
  if redis.call('ZSCORE', index, all[i]) then
    total = total + tonumber(all[i + 1])
  else
    forgotten = forgotten + redis.call('HDEL', sizes, all[i])
  end
end
for _, member in ipairs(redis.call('ZRANGE', index, 0, -1)) do
  if redis.call('HEXISTS', sizes, member) == 0 then forgotten = forgotten + redis.call('ZREM', index, member) end
end
if total ~= told then redis.call('SET', use, string.format('%.0f', total)) end
return {total, told - total, forgotten}
