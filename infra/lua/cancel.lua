-- Ends a job as cancelled, with the result that the caller composed from the first events of its log.
-- ARGV: job id, number of those events, result ('' none), '1' for only if nobody watches it any more.
-- Returns 1; 0 for an unknown job; -1, nothing changed, where the log has grown since: compose again; 2, nothing changed,
-- where it was watched again, or has ended by itself.
local job = read(ARGV[1])
if not job then return 0 end
if ARGV[4] == '1' and not is_past(redis.call('ZSCORE', WATCH, job.id)) then return 2 end
if TERMINAL[job.status] then return 1 end
if job.num_events ~= tonumber(ARGV[2]) then return -1 end
finish(job, 'cancel', nil, nil, ARGV[3] ~= '' and { result = ARGV[3] } or {})
tell_feed()
return 1
