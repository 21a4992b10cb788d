-- Ends jobs past their limits. ARGV: how long the store has answered the caller (ms; '' for ever): jobs that may be
-- unwatched for longer are left. Returns {1 to be called again, id, new status, ...}; of those whose watch has lapsed,
-- which are to be cancelled by the caller, the id and 'unwatched'.
local steady_ms = tonumber(ARGV[1]) or math.huge
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
local num_left = 0
for _, id in ipairs(unwatched) do
  local job = read(id)
  if not job or TERMINAL[job.status] then
    redis.call('ZREM', WATCH, id)
  elseif (tonumber(redis.call('HGET', job_key(id), 'watch_ms') or nil) or 0) > steady_ms then
    num_left = num_left + 1
  else
    ended[#ended + 1], ended[#ended + 2] = id, 'unwatched'
  end
end
if #unwatched == LIMIT and num_left == 0 then ended[1] = 1 end
-- What somebody from outside has trimmed from a stream could never be claimed: jobs that wait for their first attempt get
-- a new entry there, page by page from the front, as far as some were missing.
local PAGE, MAX_PAGES = 64, 64
for _, tier in ipairs(TIERS) do
  for page = 0, MAX_PAGES - 1 do
    local num_mended = 0
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', WAITING[tier], '(0', '+inf', 'LIMIT', page * PAGE, PAGE)) do
      local job = read(id)
      if not job then
        redis.call('ZREM', WAITING[tier], id)
      elseif job.attempt == 0 and #redis.call('XRANGE', STREAM[tier], job.entry, job.entry) == 0 then
        redis.call('HSET', job_key(id), 'entry', redis.call('XADD', STREAM[tier], '*', 'j', id))
        num_mended = num_mended + 1
      end
    end
    if num_mended == 0 then break end
  end
end
tell_feed()
return ended
