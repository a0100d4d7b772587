-- Releases an idempotency key, if this request has claimed it. KEYS claim      ARGV request      Returns 1, or 0.
local claim, request = key(), arg()
local found = call('GET', claim)
if not found or string.sub(found, -#request) ~= request then return 0 end
return call('DEL', claim)
