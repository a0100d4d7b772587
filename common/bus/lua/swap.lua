-- Gives a collection's name to another collection, or removes it, if its record is still the one that the caller read.
-- KEYS records removed      ARGV name expected_record new_record('' none) id_of_the_removed      Returns 1, or 0.
local records, removed = key(), key()
local name, expected, record, id = arg(), arg(), arg(), arg()
if call('HGET', records, name) ~= expected then return 0 end
call('SADD', removed, id)
if record == '' then call('HDEL', records, name) else call('HSET', records, name, record) end
return 1
