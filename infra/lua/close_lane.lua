-- Closes a lane to new jobs. KEYS: lanes, closed lanes. ARGV: lane. Returns 1; 0 for an unknown lane; -1, nothing
-- changed, where it is the last open one of its alias.
local alias = redis.call('HGET', KEYS[1], ARGV[1])
if not alias then return 0 end
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return 1 end
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  if flat[i] ~= ARGV[1] and flat[i + 1] == alias and redis.call('HEXISTS', KEYS[2], flat[i]) == 0 then
    redis.call('HSET', KEYS[2], ARGV[1], redis.call('HINCRBY', KEYS[2], 'clock', 1))
    return 1
  end
end
return -1
