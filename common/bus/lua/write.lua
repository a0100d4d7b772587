-- Appends a write to a shard's stream and names the shard to whoever applies writes, both or neither.
-- KEYS writes written      ARGV write shard most
local writes, written = key(), key()
local write, shard, most = arg(), arg(), num()
local entry = call('XADD', writes, '*', 'w', write)
call('XADD', written, 'MAXLEN', '~', most, '*', 's', shard)
return entry
