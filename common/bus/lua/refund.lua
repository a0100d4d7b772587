-- Refunds the charges of a request, as far as its buckets are not full. KEYS running, bucket per quota
-- ARGV request, cost_us per quota
local running, request = key(), arg()
call('ZREM', running, request) -- a full Redis does not refuse this write, nor any that follows it in the script
local t = call('TIME')
local now = tonumber(t[1]) * 1000000 + tonumber(t[2])
for i = 2, #KEYS do
  local cost, full = num(), tonumber(call('GET', KEYS[i]) or 0) or 0
  if cost > 0 and full > 0 then
    full = full - cost
    if full <= now then call('DEL', KEYS[i])
    else call('SET', KEYS[i], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000)) end
  end
end
return 1
