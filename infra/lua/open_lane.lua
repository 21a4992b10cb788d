-- The lowest open lane of an alias, made on first use. KEYS: lanes, closed lanes. ARGV: alias.
local lowest
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do
  local number = tonumber(flat[i])
  local is_its = number and flat[i + 1] == ARGV[1] and redis.call('HEXISTS', KEYS[2], flat[i]) == 0
  if is_its and (not lowest or number < lowest) then lowest = number end
end
if not lowest then
  lowest = redis.call('HINCRBY', KEYS[1], 'next', 1)
  redis.call('HSET', KEYS[1], lowest, ARGV[1])
end
return lowest
