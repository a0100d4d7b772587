-- Indexes a dead letter by its job, unless it is indexed already. KEYS letters      ARGV job entry
local letters, job, entry = key(), arg(), arg()
index_letter(letters, job, entry)
return 1
