-- Drops entries whose jobs are gone from a tenant's index, but not such as a submit may be about to fill.
-- KEYS: the index. ARGV: how old an entry must be (ms), job ids.
local time = redis.call('TIME')
local newest = time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[1]
for i = 2, #ARGV do
  local noted_ms = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[i]) or nil)
  if noted_ms and noted_ms <= newest then redis.call('ZREM', KEYS[1], ARGV[i]) end
end
return 1
