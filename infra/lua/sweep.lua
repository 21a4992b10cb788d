-- Ends jobs past their limits. Returns {1 to be called again, id, new status, ...}; of those whose watch has lapsed,
-- which are to be cancelled by the caller, the id and 'unwatched'.
local LIMIT = 200
local ended = { 0 }
local function note(job) ended[#ended + 1], ended[#ended + 2] = job.id, job.status end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', EXPIRY, '-inf', NOW, 'LIMIT', 0, LIMIT)) do
  local job = read(id)
  if not job or TERMINAL[job.status] then
    redis.call('ZREM', EXPIRY, id)
  else
    run_out(job)
    note(job)
  end
end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', NOW)) do
  local job = read(id)
  if not job or TERMINAL[job.status] then
    redis.call('ZREM', DUE, id)
  elseif is_last_lease_lost(job) then
    bury(job)
    note(job)
  end
  if #ended > 2 * LIMIT then break end
end
if #ended > LIMIT then ended[1] = 1 end
local unwatched = redis.call('ZRANGEBYSCORE', WATCH, '-inf', NOW, 'LIMIT', 0, LIMIT)
if #unwatched == LIMIT then ended[1] = 1 end
for _, id in ipairs(unwatched) do
  local job = read(id)
  if not job or TERMINAL[job.status] then
    redis.call('ZREM', WATCH, id)
  else
    ended[#ended + 1], ended[#ended + 2] = id, 'unwatched'
  end
end
tell_feed()
return ended
