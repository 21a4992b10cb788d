-- Notes a job in its tenant's index, also when memory is full: the submit beside it is what is refused
-- then. KEYS: the index. ARGV: job id, time to keep entries (ms).
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], 'NX', now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
