-- Replaces a record, of a collection or its placement, if it is still the one that the caller read, and says that
-- something was changed.
-- KEYS records changes      ARGV name expected('' none) new mark      Returns 1, or 0.
local records, changes = key(), key()
local name, expected, new, mark = arg(), arg(), arg(), arg()
if (call('HGET', records, name) or '') ~= expected then return 0 end
call('HSET', records, name, new)
call('SET', changes, mark)
return 1
