-- Claims an idempotency key, unless it is claimed already. KEYS claim      ARGV value seconds      Returns the claim's value.
local claim, value, seconds = key(), arg(), arg()
local found = call('GET', claim)
if found then return found end
call('SET', claim, value, 'EX', seconds)
return value
