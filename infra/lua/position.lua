-- Waiting jobs ahead of a queued one in its tier; nil unless queued. ARGV: job id.
local job = read(ARGV[1])
return job and job.status == 'queued' and redis.call('ZRANK', WAITING[job.tier], job.id)
