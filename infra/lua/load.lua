-- What lies in the lane. Returns paused, then of each tier: waiting, of them delayed, not ended, prompt tokens and output
-- tokens of the waiting; then the sums of SIZES. Of a tier's waiting jobs, those with a negative order were started once
-- and wait for a time: `REQUEUED_FIRST` + that time.
local found = { redis.call('HGET', STATE, 'paused') == '1' and 1 or 0 }
for _, tier in ipairs(TIERS) do
  found[#found + 1] = redis.call('ZCARD', WAITING[tier])
  found[#found + 1] = redis.call('ZCOUNT', WAITING[tier], string.format('(%.0f', NOW + REQUEUED_FIRST), '(0')
  found[#found + 1] = redis.call('XLEN', STREAM[tier])
  for _, sum in ipairs(redis.call('HMGET', STATE, 'prompt:' .. tier, 'output:' .. tier)) do
    found[#found + 1] = tonumber(sum) or 0
  end
end
for _, sum in ipairs(redis.call('HMGET', STATE, unpack(SIZES))) do found[#found + 1] = tonumber(sum) or 0 end
return found
