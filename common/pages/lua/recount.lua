-- Counts a partition's bytes anew, and removes sizes of members that are not in the index, and members without a size.
-- KEYS: index, sizes, use, shares.
-- Returns the bytes, the error of the count before, and how many members were removed.
local index, sizes, use, shares = unpack(KEYS)
local told = tonumber(redis.call('GET', use) or '0')
local all, total, forgotten, by_owner = redis.call('HGETALL', sizes), 0, 0, {}
for i = 1, #all, 2 do
  local size, owner = string.match(all[i + 1], '^(%d+) ?(.*)$')
  if size and redis.call('ZSCORE', index, all[i]) then
    total, by_owner[owner] = total + tonumber(size), (by_owner[owner] or 0) + tonumber(size)
  else
    forgotten = forgotten + redis.call('HDEL', sizes, all[i])
  end
end
for _, member in ipairs(redis.call('ZRANGE', index, 0, -1)) do
  if redis.call('HEXISTS', sizes, member) == 0 then forgotten = forgotten + redis.call('ZREM', index, member) end
end
if total ~= told then redis.call('SET', use, string.format('%.0f', total)) end
redis.call('DEL', shares)
for owner, bytes in pairs(by_owner) do redis.call('HSET', shares, owner, string.format('%.0f', bytes)) end
return {total, told - total, forgotten}
