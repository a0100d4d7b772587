-- Cleans up one family: ends expired jobs that no worker holds, deletes the consumers of dead workers that hold nothing,
-- removes the records of dead workers, and recomputes use from the streams. Any difference is a bug and is returned, as are
-- the classes of convicted entries.
-- KEYS use workers dead letters | lane per class | heart per worker | {job log journal} per expired entry | room
-- ARGV n class.. | n worker.. | n {class_index id entry}..
local use, workers, dead, letters = key(), key(), key(), key()
open_door(use)
local classes, lanes, hearts, live = {}, {}, {}, {}
for i = 1, num() do classes[i] = arg(); lanes[i] = key() end
for _ = 1, num() do local w = arg(); hearts[w] = key() end
for w, heart in pairs(hearts) do
  live[w] = call('EXISTS', heart) == 1
  if not live[w] then call('HDEL', workers, w) end
end
local now, ended, deleted, wrong, bad, uncounted = now_ms(), 0, 0, {}, {}, {}
for _ = 1, num() do
  local c, id, entry = num(), arg(), arg()
  local k = {use = use, dead = dead, letters = letters, lane = lanes[c], job = key(), log = key(), journal = key()}
  local f = fields(k.job, 'entry', 'deadline')
  local holder = owner(k.lane, entry)
  local free = not holder or holder == RETURNED
  if f[1] ~= entry then
    if free and convict(k, classes[c], id, entry, NO_JOB) then
      bad[#bad + 1] = classes[c]
      uncounted[c] = true
    end
  elseif tonumber(f[2]) < now and free then
    if end_job(k, id, 'expired', nil, 'deadline_exceeded', 'the deadline passed before the job ran') then
      ended = ended + 1
    end
  end
end
for i, class in ipairs(classes) do
  if uncounted[i] then recount(use, lanes[i], class) end
  local consumers = redis.pcall('XINFO', 'CONSUMERS', lanes[i], GROUP)
  for _, c in ipairs(consumers.err and {} or consumers) do
    local info = {}
    for n = 1, #c, 2 do info[c[n]] = c[n + 1] end
    if info.name ~= RETURNED and info.pending == 0 and hearts[info.name] and not live[info.name] then
      call('XGROUP', 'DELCONSUMER', lanes[i], GROUP, info.name)
      deleted = deleted + 1
    end
  end
  local items, tokens = held_in(lanes[i])
  local had_items, had_tokens = use_of(use, class)
  if had_items ~= items or had_tokens ~= tokens then
    wrong[#wrong + 1] = class .. ' ' .. had_items .. '/' .. had_tokens .. ' ' .. items .. '/' .. tokens
    call('HSET', use, class .. ':items', items, class .. ':tokens', tokens)
  end
  if items == 0 and string.sub(class, 1, 2) == 'w.' and live[string.sub(class, 3)] == false then
    call('HDEL', use, class .. ':items', class .. ':tokens')
    call('DEL', lanes[i])
  end
end
return {ended, deleted, wrong, bad}
