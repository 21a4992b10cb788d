-- Claims an idempotency key. KEYS: its slot. ARGV: fingerprint, job id, time to keep it (ms).
-- Returns fingerprint and job id of whoever claimed it first.
redis.call('HSETNX', KEYS[1], 'fingerprint', ARGV[1])
if redis.call('HSETNX', KEYS[1], 'job_id', ARGV[2]) == 1 then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return redis.call('HMGET', KEYS[1], 'fingerprint', 'job_id')
