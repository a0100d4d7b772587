-- Appends a write to a shard's stream, and the shard's name to the stream that its replicas wait on: both or neither.
-- KEYS writes written      ARGV write shard most
local writes, written = key(), key()
local write, shard, most = arg(), arg(), num()
local entry = call('XADD', writes, '*', 'w', write)
call('XADD', written, 'MAXLEN', '~', most, '*', 's', shard)
return entry
