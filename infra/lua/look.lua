-- A job's record and, while it is queued, where it stands. ARGV: job id. Returns the record's fields and, unless it is not
-- queued, its `place`. An empty record: unknown.
local record = redis.call('HGETALL', job_key(ARGV[1]))
local status, tier = unpack(redis.call('HMGET', job_key(ARGV[1]), 'status', 'tier'))
if status ~= 'queued' then return { record } end
return { record, unpack(place(ARGV[1], tier)) }
