-- Hides a notice for a while longer. ARGV: notice id, delay (ms).
return redis.call('ZADD', OUTBOX, 'XX', NOW + ARGV[2], ARGV[1])
