-- A job's record and, while it is queued, where it stands. ARGV: job id. Returns the record's fields and, unless it is not
-- queued: its rank in its tier, prompt and output tokens of those ahead, the number of jobs that run in the lane. The first
-- PLACE_LOOKS ahead are counted, the rest are taken as the average of those behind. An empty record: unknown.
local record = redis.call('HGETALL', job_key(ARGV[1]))
local status, tier = unpack(redis.call('HMGET', job_key(ARGV[1]), 'status', 'tier'))
local rank = status == 'queued' and redis.call('ZRANK', WAITING[tier], ARGV[1])
if not rank then return { record } end
local prompt, output, num_looked = 0, 0, math.min(rank, PLACE_LOOKS)
for _, id in ipairs(num_looked > 0 and redis.call('ZRANGE', WAITING[tier], 0, num_looked - 1) or {}) do
  local job = redis.call('HMGET', job_key(id), 'cost_tokens', 'output_tokens', 'completion_tokens')
  local its_prompt, its_output = work_left(tonumber(job[1]) or 0, tonumber(job[2]), tonumber(job[3]) or 0)
  prompt, output = prompt + its_prompt, output + its_output
end
if rank > num_looked then
  local sums = redis.call('HMGET', STATE, 'prompt:' .. tier, 'output:' .. tier)
  local num_taken, num_rest = rank - num_looked, redis.call('ZCARD', WAITING[tier]) - num_looked
  prompt = prompt + math.floor(((tonumber(sums[1]) or 0) - prompt) * num_taken / num_rest)
  output = output + math.floor(((tonumber(sums[2]) or 0) - output) * num_taken / num_rest)
end
local num_running = 0
for _, name in ipairs(TIERS) do
  num_running = num_running + redis.call('XLEN', STREAM[name]) - redis.call('ZCARD', WAITING[name])
end
return { record, rank, prompt, output, num_running }
