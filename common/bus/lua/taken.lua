-- Drops the messages to a job up to a number: its log says what became of them.
-- KEYS use control      ARGV number      Returns how many were dropped.
local use, control = key(), key()
open_door(use)
local number, dropped = num(), 0
local done = call('HGET', control, 'done')
if call('EXISTS', control) == 0 or tonumber(done or '0') >= number then return 0 end
call('HSET', control, 'done', number)
for _, field in ipairs(call('HKEYS', control)) do
  if (tonumber(field) or number + 1) <= number then dropped = dropped + call('HDEL', control, field) end
end
return dropped
