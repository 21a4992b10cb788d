-- Ends the serving of a lane that was dropped. KEYS: lanes, closed lanes. ARGV: lane, the moment of the drop.
-- Returns 1; 0, nothing changed, where it was revived or opened since.
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[2], ARGV[1])
return redis.call('HDEL', KEYS[1], ARGV[1])
