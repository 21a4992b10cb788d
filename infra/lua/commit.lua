-- Ends a job by its holder's word. ARGV: job id, attempt, change, body of the terminal event, number of result fields,
-- their names and values, then the last publication: number of its first event ('' the next), number of events, values.
-- Returns 1, also when repeated by the same hold; 0 where the hold is not good.
local job, known = held(ARGV[1], ARGV[2])
if not job then return known and known.committed == tonumber(ARGV[2]) and 1 or 0 end
local num_fields = tonumber(ARGV[5])
local fields = { committed = job.attempt }
for i = 6, 5 + 2 * num_fields, 2 do fields[ARGV[i]] = ARGV[i + 1] end
local at = 6 + 2 * num_fields
local num_there = num_known(job, ARGV[at])
if not num_there then
  return redis.error_reply(string.format('GAP %s %d %s', job.id, job.num_events, ARGV[at]))
end
append_deltas(job, at + 2, tonumber(ARGV[at + 1]), num_there)
finish(job, ARGV[3], ARGV[4], nil, fields)
tell_feed()
return 1
