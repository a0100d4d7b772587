-- Charges a request to the quotas of an API key, to all of them or to none. A bucket holds the instant (µs) at which it
-- will be full again, and lives until then; a bucket that does not exist is full.
-- KEYS running, bucket per quota
-- ARGV request concurrency(0: unlimited) lease_end_ms window_us, cost_us per quota (0: unlimited, or free)
-- Returns {0}, or the number of the quota that refuses (1 running, 2.. the buckets), and the µs to wait for it.
local running, request, concurrency, lease_end, window = key(), arg(), num(), num(), num()
local t = call('TIME')
local now = tonumber(t[1]) * 1000000 + tonumber(t[2])
local now_at = math.floor(now / 1000)
local function whole(number) return string.format('%.0f', number) end
if concurrency > 0 then
  call('ZREMRANGEBYSCORE', running, '-inf', whole(now_at))
  if not call('ZSCORE', running, request) and call('ZCARD', running) >= concurrency then return {1, 0} end
end
local full = {}
for i = 2, #KEYS do
  local cost = num()
  if cost > 0 then
    full[i] = math.max(tonumber(call('GET', KEYS[i]) or 0), now) + cost
    if full[i] - now > window then return {i, full[i] - now - window} end
  end
end
for i = 2, #KEYS do
  if full[i] then call('SET', KEYS[i], whole(full[i]), 'PX', math.ceil((full[i] - now) / 1000)) end
end
if concurrency > 0 then
  call('ZADD', running, whole(lease_end), request)
  call('PEXPIREAT', running, whole(math.max(lease_end, now_at) + 600000))
end
return {0, 0}
