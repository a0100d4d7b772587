-- Returns the tier of each page: 1 for Redis, else when the copy on disk expires (ms), else 0.
-- KEYS value disk per page; ARGV member per page
local found = {}
for n = 1, #ARGV do
  if redis.call('EXISTS', KEYS[2 * n - 1]) == 1 then
    found[n] = 1
  else
    found[n] = tonumber(redis.call('HGET', KEYS[2 * n], ARGV[n]) or 0)
  end
end
return found
