-- Opens a closed lane again. KEYS: lanes, closed lanes. ARGV: lane. Returns 1; 0 for an unknown lane.
redis.call('HDEL', KEYS[2], ARGV[1])
return redis.call('HEXISTS', KEYS[1], ARGV[1])
