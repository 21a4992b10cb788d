-- Tells of a live worker. KEYS: its alias's workers. ARGV: owner, record, how long it holds (ms).
-- Forgets those whose time is over.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %d ', now, now + ARGV[3]) .. ARGV[2])
local longest = now
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  local until_ms = tonumber(string.match(flat[i + 1], '^%d+ (%d+) '))
  if until_ms <= now then redis.call('HDEL', KEYS[1], flat[i]) else longest = math.max(longest, until_ms) end
end
return redis.call('PEXPIREAT', KEYS[1], string.format('%d', longest))
