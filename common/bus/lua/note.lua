-- Adds jobs to the list of a session's jobs, so that they are deleted with the session. KEYS session jobs      ARGV n {job request}..
local session, jobs = key(), key()
for _ = 1, num() do call('HSET', jobs, arg(), arg()) end
local left = call('PTTL', session)
if left ~= -1 then call('PEXPIRE', jobs, math.max(left, 0) + TRACE_MS) end -- -1: marked as deleted, and must not expire
return 1
