-- Claims ripe notices and hides them for a while. ARGV: most of them, hide (ms). Returns id and fields of each.
local taken = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', OUTBOX, '-inf', NOW, 'LIMIT', 0, ARGV[1])) do
  if redis.call('EXISTS', notice_key(id)) == 1 then
    redis.call('HINCRBY', notice_key(id), 'tries', 1)
    redis.call('ZADD', OUTBOX, NOW + ARGV[2], id)
    taken[#taken + 1] = { id, redis.call('HGETALL', notice_key(id)) }
  else
    redis.call('ZREM', OUTBOX, id)
  end
end
return taken
