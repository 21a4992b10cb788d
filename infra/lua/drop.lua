-- Drops a closed lane that holds nothing any more. ARGV: the moment at which it was closed or revived.
-- Returns 1, also where it was dropped before; 0, nothing changed, while there are jobs, notices or dead letters.
-- Records and logs of finished jobs stay as long as ever. What comes later is told apart by `dropped`: see submit.lua.
redis.call('ZREMRANGEBYSCORE', DEAD, '-inf', NOW - DEAD_LETTER_MS)
local held = redis.call('ZCARD', DUE) + redis.call('ZCARD', OUTBOX) + redis.call('ZCARD', DEAD)
for _, tier in ipairs(TIERS) do held = held + redis.call('XLEN', STREAM[tier]) + redis.call('ZCARD', WAITING[tier]) end
if held > 0 then return 0 end
for _, tier in ipairs(TIERS) do redis.call('DEL', STREAM[tier], WAITING[tier]) end
redis.call('DEL', DUE, EXPIRY, OUTBOX, DEAD, WATCH, STATE)
redis.call('HSET', STATE, 'dropped', ARGV[1])
redis.call('PEXPIRE', FEED, EVENT_LOG_MS) -- who follows a job's log may not have read its end yet
redis.call('PEXPIRE', CONTROL, EVENT_LOG_MS)
return 1
