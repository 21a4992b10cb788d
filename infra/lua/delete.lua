-- Forgets a finished job. ARGV: job id. Returns 1; 0 for an unknown job; its status where it is not finished.
local job = read(ARGV[1])
if not job then return 0 end
if not TERMINAL[job.status] then return job.status end
redis.call('DEL', job_key(job.id), events_key(job.id))
redis.call('ZREM', DEAD, job.id)
return 1
