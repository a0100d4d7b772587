-- Replaces a collection's placement if it is still the one that the caller read, and says that something was changed.
-- KEYS placements changes      ARGV id expected('' none) new('' none) mark      Returns 1, or 0.
local placements, changes = key(), key()
local id, expected, new, mark = arg(), arg(), arg(), arg()
if (call('HGET', placements, id) or '') ~= expected then return 0 end
if new == '' then call('HDEL', placements, id) else call('HSET', placements, id, new) end
call('SET', changes, mark)
return 1
