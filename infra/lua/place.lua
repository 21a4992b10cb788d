-- Where a queued job stands. ARGV: job id. Returns its rank in its tier, prompt and output tokens of those ahead, and the
-- number of jobs that run in the lane; nil unless queued. The first PLACE_LOOKS ahead are counted, the rest are taken as
-- the average of those behind.
local status, tier = unpack(redis.call('HMGET', job_key(ARGV[1]), 'status', 'tier'))
local rank = status == 'queued' and redis.call('ZRANK', WAITING[tier], ARGV[1])
if not rank then return nil end
local prompt, output, num_looked = 0, 0, math.min(rank, PLACE_LOOKS)
for _, id in ipairs(num_looked > 0 and redis.call('ZRANGE', WAITING[tier], 0, num_looked - 1) or {}) do
  local cost, asked, emitted = unpack(redis.call('HMGET', job_key(id), 'cost_tokens', 'output_tokens', 'completion_tokens'))
  local its_prompt, its_output = work_left(tonumber(cost) or 0, tonumber(asked), tonumber(emitted) or 0)
  prompt, output = prompt + its_prompt, output + its_output
end
if rank > num_looked then
  local sums = redis.call('HMGET', STATE, 'prompt:' .. tier, 'output:' .. tier)
  local num_rest = redis.call('ZCARD', WAITING[tier]) - num_looked
  prompt = prompt + math.floor(((tonumber(sums[1]) or 0) - prompt) * (rank - num_looked) / num_rest)
  output = output + math.floor(((tonumber(sums[2]) or 0) - output) * (rank - num_looked) / num_rest)
end
local num_running = 0
for _, name in ipairs(TIERS) do
  num_running = num_running + redis.call('XLEN', STREAM[name]) - redis.call('ZCARD', WAITING[name])
end
return { rank, prompt, output, num_running }
