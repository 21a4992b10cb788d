-- Gives a running job back. ARGV: job id, attempt, delay (ms), body of the event.
-- Returns 1, also when repeated by the same hold; 0 where the hold is not good.
local job, known = held(ARGV[1], ARGV[2])
if not job then
  local attempt = tonumber(ARGV[2])
  return known and known.released == attempt and known.attempt == attempt and 1 or 0
end
change(job, 'requeue')
local due_ms = NOW + ARGV[3]
redis.call('ZADD', DUE, due_ms, job.id)
wait(job, due_ms + REQUEUED_FIRST)
set_expiry(job, nil)
append(job, 'job.requeued', ARGV[4])
redis.call('HSET', job_key(job.id), 'status', job.status, 'num_events', job.num_events, 'owner', '',
  'released', job.attempt)
tell_workers('')
tell_feed()
return 1
