-- Registers, refreshes or removes a worker, and tells it which of its jobs to stop.
-- A start creates the groups of its lanes, which read from the lanes' beginning, so that jobs queued before are not lost.
-- A full Redis refuses XGROUP CREATE as a plain command, not here. A stop deletes the worker's own lane (class `own`) if it
-- is empty. Notes in `use`, as `memory`, how many thousandths of its limit Redis uses (0: it has none), for `admit`.
-- KEYS use workers heart | lane.. | {job lane} per held job | room
-- ARGV mode(start|keep|stop) worker record ttl own | n lanes | n {id entry epoch}..
local use, workers, heart = key(), key(), key()
open_door(use)
local mode, worker, record, ttl, own, lanes = arg(), arg(), arg(), num(), arg(), {}
for i = 1, num() do lanes[i] = key() end
if mode == 'stop' then
  call('DEL', heart)
  call('HDEL', workers, worker)
  for _, lane in ipairs(lanes) do
    if call('XLEN', lane) == 0 then
      call('DEL', lane)
      call('HDEL', use, own .. ':items', own .. ':tokens')
    end
  end
  return {'stopped'}
end
if mode == 'start' then
  call('SET', heart, '1', 'PX', ttl)
  wake_waiting(use)
  for _, lane in ipairs(lanes) do redis.pcall('XGROUP', 'CREATE', lane, GROUP, '0', 'MKSTREAM') end
elseif call('PEXPIRE', heart, ttl) == 0 then return {'gone'} end
if record ~= '' then call('HSET', workers, worker, record) end
local info = call('INFO', 'memory')
local most = tonumber(string.match(info, '\nmaxmemory:(%d+)') or '0')
call('HSET', use, 'memory', most > 0 and math.floor(1000 * string.match(info, 'used_memory:(%d+)') / most) or 0)
local revoked = {'ok'}
for _ = 1, num() do
  local id, entry, epoch, job, lane = arg(), arg(), num(), key(), key()
  if lease(lane, entry, worker) ~= epoch or call('HGET', job, 'cancelled') then revoked[#revoked + 1] = id end
end
return revoked
