-- Starts the next attempt of the job that should go first.
-- ARGV: owner, free tokens ('' any), lease (ms), profile, '1' where the owner runs nothing else, name of the call ('' none).
-- Returns {now, 0} for nothing, {now, 1} to be called again, {now, 2, fields of the record...}, {now, 3} to make room
-- for a suspect.
local owner, free_tokens, lease_ms, profile = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local is_alone = ARGV[5] == '1'
local call, called_key = ARGV[6], PREFIX .. ':claim:' .. owner
local PAGE, MAX_LOOKS = 64, 256
local CALL_MS = 60000 -- kept so much longer than the lease
local num_ended = 0

-- What this very call has started already, its answer lost on the way: the same attempt, its lease as new.
local function started_before()
  local name, id, attempt = string.match(redis.call('GET', called_key) or '', '^(%S+) (%S+) (%S+)$')
  local job = name == call and held(id, attempt)
  if not job then return nil end
  redis.call('ZADD', DUE, 'XX', NOW + lease_ms, id)
  redis.call('PEXPIRE', called_key, lease_ms + CALL_MS)
  return { NOW, 2, unpack(redis.call('HGETALL', job_key(id))) }
end
if call ~= '' then
  local started = started_before()
  if started then return started end
end

local state, room_owner = {}, nil
local flat = redis.call('HGETALL', STATE)
for i = 1, #flat, 2 do
  state[flat[i]] = tonumber(flat[i + 1])
  if flat[i] == 'room_owner' then room_owner = flat[i + 1] end
end
if state.paused == 1 then return { NOW, 0 } end

local function fits(job) return not free_tokens or job.cost_tokens <= free_tokens end

-- Whether this worker is the one to let its jobs end for a suspect's sake.
local function makes_room()
  if room_owner ~= owner and (state.room_until_ms or 0) > NOW then return false end
  redis.call('HSET', STATE, 'room_owner', owner, 'room_until_ms', NOW + MAKE_ROOM_MS)
  return true
end

-- The job's profile is that of its tokens: the one under which the first were emitted. Another of the same weights that
-- goes on with them is written down beside it and returned.
local function note_profile(job)
  if profile == '' then return nil end
  local key = job_key(job.id)
  local own, others = unpack(redis.call('HMGET', key, 'profile', 'continued_profiles'))
  if not own or job.completion_tokens == 0 then
    redis.call('HSET', key, 'profile', profile)
  elseif own ~= profile and string.match(own, '^[^;]*') == string.match(profile, '^[^;]*') then
    if not string.find('\n' .. (others or '') .. '\n', '\n' .. profile .. '\n', 1, true) then
      redis.call('HSET', key, 'continued_profiles', others and others .. '\n' .. profile or profile)
    end
    return profile
  end
end

local function start(job)
  if job.status == 'running' then
    lose(job)
    append(job, 'job.requeued', cmsgpack.pack({ attempt = job.attempt, reason = 'lease_lost' }))
  end
  change(job, 'claim')
  job.attempt = job.attempt + 1
  wait_no_more(job)
  redis.call('ZADD', DUE, NOW + lease_ms, job.id)
  set_expiry(job, NOW)
  append(job, 'job.started', cmsgpack.pack({ attempt = job.attempt, profile = note_profile(job) }))
  if job.attempt == 1 then notify(job, 'job.started') end
  redis.call('HSET', job_key(job.id), 'status', job.status, 'attempt', job.attempt, 'num_events',
    job.num_events, 'owner', owner)
  redis.call('HSETNX', job_key(job.id), 'started_ms', NOW)
  if call ~= '' then
    redis.call('SET', called_key, string.format('%s %s %d', call, job.id, job.attempt), 'PX', lease_ms + CALL_MS)
  end
  tell_feed()
  return { NOW, 2, unpack(redis.call('HGETALL', job_key(job.id))) }
end

local function nothing()
  tell_feed()
  return { NOW, num_ended > 0 and 1 or 0 }
end

-- First the due clock: lapsed leases, retries and hand-overs whose time has come.
local num_looks, offset = 0, 0
while num_looks < MAX_LOOKS do
  local ripe = redis.call('ZRANGEBYSCORE', DUE, '-inf', NOW, 'WITHSCORES', 'LIMIT', offset, PAGE)
  if #ripe == 0 then break end
  for i = 1, #ripe, 2 do
    num_looks = num_looks + 1
    local job = read(ripe[i])
    if not job or TERMINAL[job.status] then
      redis.call('ZREM', DUE, ripe[i])
    elseif is_past(redis.call('ZSCORE', EXPIRY, job.id)) then
      run_out(job)
      num_ended = num_ended + 1
    elseif is_last_lease_lost(job) then
      bury(job)
      num_ended = num_ended + 1
    else
      if is_suspect(job) and not is_alone then
        if makes_room() then
          tell_feed()
          return { NOW, 3 }
        end
      elseif fits(job) then
        return start(job)
      elseif NOW - ripe[i + 1] >= PATIENCE_MS then
        return nothing() -- not to be overtaken any more
      end
      offset = offset + 1
    end
  end
end
if num_looks >= MAX_LOOKS and num_ended > 0 then return nothing() end

local function last_delivered(stream)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if not groups.err then
    for _, group in ipairs(groups) do
      local about = {}
      for i = 1, #group, 2 do about[group[i]] = group[i + 1] end
      if about.name == GROUP then return about['last-delivered-id'] end
    end
  end
  -- A new lane, or a group lost in a failover: what was delivered is met again, and told apart by its record.
  redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  return '0-0'
end

local function read_past(stream)
  return redis.call('XREADGROUP', 'GROUP', GROUP, 'worker', 'COUNT', 1, 'STREAMS', stream, '>')
end

-- The tier's first job that was never started, after ending those before it whose time is over.
local function head(tier)
  local stream = STREAM[tier]
  local last = last_delivered(stream)
  while num_looks < 2 * MAX_LOOKS do
    num_looks = num_looks + 1
    local entry = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
    if not entry then return nil end
    local job = read(entry[2][2])
    if job and job.status == 'queued' and job.attempt == 0 then
      if not is_past(redis.call('ZSCORE', EXPIRY, job.id)) then return job end
      run_out(job)
      num_ended = num_ended + 1
    else -- met again: it runs, or waits in the due clock, or has ended, or its record is gone
      read_past(stream)
      last = entry[1]
      if not job or TERMINAL[job.status] then
        redis.call('XACK', stream, GROUP, last)
        redis.call('XDEL', stream, last)
      end
      num_ended = num_ended + 1
    end
  end
  return nil
end

-- `tiers.Service.choose`, line by line.
local heads, ages = {}, {}
local overdue, next_tier
local clock = state.clock or 0
local function pass(tier) return math.max(state['pass:' .. tier] or 0, clock) end
for _, tier in ipairs(TIERS) do
  local job = head(tier)
  heads[tier] = job
  if job then
    ages[tier] = (NOW - math.max(job.created_ms, state['served_ms:' .. tier] or 0)) / STRIDES[tier]
    if ages[tier] >= PATIENCE_MS and (not overdue or ages[tier] > ages[overdue]) then overdue = tier end
    if fits(job) then
      local better = not next_tier or pass(tier) < pass(next_tier)
        or (pass(tier) == pass(next_tier) and job.created_ms < heads[next_tier].created_ms)
      if better then next_tier = tier end
    end
  end
end
if overdue then next_tier = fits(heads[overdue]) and overdue or nil end
if not next_tier then
  if num_looks < 2 * MAX_LOOKS then num_ended = 0 end -- all was seen: calling again would find no more
  return nothing()
end

local served = pass(next_tier)
redis.call('HSET', STATE, 'clock', served, 'pass:' .. next_tier, served + STRIDES[next_tier],
  'served_ms:' .. next_tier, NOW)
read_past(STREAM[next_tier])
return start(heads[next_tier])
