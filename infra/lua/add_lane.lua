-- One more lane of an alias. KEYS: lanes. ARGV: alias. Returns its number, which no lane had before.
local number = redis.call('HINCRBY', KEYS[1], 'next', 1)
redis.call('HSET', KEYS[1], number, ARGV[1])
return number
