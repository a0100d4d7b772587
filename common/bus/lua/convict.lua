-- Makes dead letters of entries of one lane that cannot be decoded.
-- KEYS use dead letters lane | {job log journal} per entry | room     ARGV class | n {id entry message}..
-- Returns how many entries were still there.
local use, dead, letters, lane = key(), key(), key(), key()
open_door(use)
local class, done = arg(), 0
for _ = 1, num() do
  local id, entry, message = arg(), arg(), arg()
  local k = {use = use, dead = dead, letters = letters, lane = lane, job = key(), log = key(), journal = key()}
  if convict(k, class, id, entry, message) then done = done + 1 end
end
if done > 0 then recount(use, lane, class) end
return done
