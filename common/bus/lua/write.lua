-- Appends a write to a shard's stream, and the shard's name to the stream that its replicas wait on: both or neither.
-- A shard that was sealed takes no more writes: then nothing is returned.
-- KEYS writes written sealed      ARGV write shard most
local writes, written, sealed = key(), key(), key()
local write, shard, most = arg(), arg(), num()
if call('EXISTS', sealed) == 1 then return false end
local entry = call('XADD', writes, '*', 'w', write)
call('XADD', written, 'MAXLEN', '~', most, '*', 's', shard)
return entry
