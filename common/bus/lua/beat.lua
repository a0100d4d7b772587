-- Registers, refreshes or removes a worker, and tells it which of its jobs to stop.
-- KEYS use workers heart | {job lane} per held job      ARGV mode(start|keep|stop) worker record ttl | n {id entry epoch}..
local use, workers, heart = key(), key(), key()
open_door(use)
local mode, worker, record, ttl = arg(), arg(), arg(), num()
if mode == 'stop' then
  call('DEL', heart)
  call('HDEL', workers, worker)
  return {'stopped'}
end
if mode == 'start' then call('SET', heart, '1', 'PX', ttl)
elseif call('PEXPIRE', heart, ttl) == 0 then return {'gone'} end
if record ~= '' then call('HSET', workers, worker, record) end
local revoked = {'ok'}
for _ = 1, num() do
  local id, entry, epoch, job, lane = arg(), arg(), num(), key(), key()
  if lease(lane, entry, worker) ~= epoch or call('HGET', job, 'cancelled') then revoked[#revoked + 1] = id end
end
return revoked
