-- Admits a job, once by its id. ARGV: id, tier, most waiting jobs ('' any), the moment at which the lane was revived
-- (0 never), then name and value of the record's fields.
-- Returns {1, created_ms, its `place`...}; {0} where the id is there already; {-1} where the lane is full; {-2} where it
-- was dropped at that moment or later.
local id, tier, max_waiting = ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('EXISTS', job_key(id)) == 1 then return { 0 } end
local dropped = tonumber(redis.call('HGET', STATE, 'dropped') or nil)
if dropped and dropped >= tonumber(ARGV[4]) then return { -2 } end
if max_waiting then
  local num_waiting = 0
  for _, name in ipairs(TIERS) do num_waiting = num_waiting + redis.call('ZCARD', WAITING[name]) end
  if num_waiting >= max_waiting then return { -1 } end
end
if dropped then redis.call('HDEL', STATE, 'dropped') end
local entry = redis.call('XADD', STREAM[tier], '*', 'j', id)
redis.call('HSET', job_key(id), 'id', id, 'tier', tier, 'status', 'queued', 'entry', entry, 'created_ms', NOW,
  'attempt', 0, 'lost_count', 0, 'num_events', 1, 'prompt_tokens', 0, 'completion_tokens', 0, 'cached_tokens', 0,
  unpack(ARGV, 5))
local job = read(id)
job.num_events = 0
append(job, 'job.queued', '\128') -- an empty map
wait(job, redis.call('HINCRBY', STATE, 'arrivals', 1))
set_expiry(job, nil)
local watch_ms = redis.call('HGET', job_key(id), 'watch_ms')
if watch_ms then redis.call('ZADD', WATCH, NOW + watch_ms, id) end
tell_feed()
return { 1, NOW, unpack(place(id, tier)) }
