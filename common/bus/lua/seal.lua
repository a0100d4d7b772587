-- Appends the last entry of a shard's stream, after which `write` appends no more; returns its id, or that of the earlier one.
-- KEYS writes written sealed      ARGV write shard most
local writes, written, sealed = key(), key(), key()
local write, shard, most = arg(), arg(), num()
local earlier = call('GET', sealed)
if earlier then return earlier end
local entry = call('XADD', writes, '*', 'w', write)
call('SET', sealed, entry)
call('XADD', written, 'MAXLEN', '~', most, '*', 's', shard)
return entry
