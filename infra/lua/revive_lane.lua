-- A job has come late to a lane that was dropped: the lane is served again, as a closed one, unless it is open.
-- KEYS: lanes, closed lanes. ARGV: lane, alias. Returns a moment after every drop that was begun before.
local moment = redis.call('HINCRBY', KEYS[2], 'clock', 1)
local is_new = redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 1
if is_new or redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then redis.call('HSET', KEYS[2], ARGV[1], moment) end
return moment
