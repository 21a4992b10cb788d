-- Somebody waits for these jobs. ARGV: time (ms; '' nobody needs to watch them any more), job ids.
for i = 2, #ARGV do
  if ARGV[1] == '' then
    redis.call('ZREM', WATCH, ARGV[i])
  else
    local status = redis.call('HGET', job_key(ARGV[i]), 'status')
    if status and not TERMINAL[status] then redis.call('ZADD', WATCH, NOW + ARGV[1], ARGV[i]) end
  end
end
return 1
