-- Stops (ARGV '1') or resumes ('0') claiming in the lane.
redis.call('HSET', STATE, 'paused', ARGV[1])
tell_workers('')
return 1
