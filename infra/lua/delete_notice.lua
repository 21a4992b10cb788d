-- Forgets a notice whose work is done. ARGV: notice id.
redis.call('DEL', notice_key(ARGV[1]))
return redis.call('ZREM', OUTBOX, ARGV[1])
