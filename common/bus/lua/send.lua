-- Keeps a message for a job's worker and names the job in the family's inbox. A number that was sent before changes nothing.
-- KEYS use job control inbox      ARGV id number(0: pause or resume) message pause('1' or '0') most
-- Returns sent|known|full|over|unknown.
local use, job, control, inbox = key(), key(), key(), key()
open_door(use)
local id, number, message, pause, most = arg(), num(), arg(), arg() == '1', num()
local f = fields(job, 'state', 'deadline')
if not f[1] then return 'unknown' end
if f[1] ~= 'queued' and f[1] ~= 'running' then return 'over' end
local c = fields(control, 'done', 'paused', number)
if number > 0 then
  if c[3] or number <= tonumber(c[1] or '0') then return 'known' end
  if call('HLEN', control) - (c[1] and 1 or 0) - (c[2] and 1 or 0) >= most then return 'full' end
  call('HSET', control, number, message)
elseif pause == (c[2] == '1') then return 'known' end
call('HSET', control, 'paused', number == 0 and pause and 1 or 0)
call('PEXPIREAT', control, math.max(tonumber(f[2]), now_ms()) + KEEP_MS)
tell(inbox, id)
return 'sent'
