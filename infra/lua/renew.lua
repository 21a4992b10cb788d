-- Extends leases. ARGV: lease (ms), then job id and attempt of each hold. Returns the indexes (from 0) of those refused.
local refused = {}
for i = 2, #ARGV, 2 do
  if held(ARGV[i], ARGV[i + 1]) then
    redis.call('ZADD', DUE, 'XX', NOW + ARGV[1], ARGV[i])
  else
    refused[#refused + 1] = (i - 2) / 2
  end
end
return refused
