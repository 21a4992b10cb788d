-- Shared by every script that works on a lane. Before it come constants written by Python: TRANSITIONS, TERMINAL,
-- TIERS, STRIDES, SIZES, MAX_SIZES, SUSPECT_STUCK_COUNT, MAX_STUCK_COUNT, MAX_LOST_COUNT, MAKE_ROOM_MS, WORKER_LOST,
-- ATTEMPT_TIMEOUT and the retention times *_MS.
-- KEYS are the lane's own, in the order of `Lane.declared`; keys of single jobs share their slot.

local STREAM, WAITING = {}, {}
for i, tier in ipairs(TIERS) do
  STREAM[tier], WAITING[tier] = KEYS[i], KEYS[#TIERS + i]
end
local DUE, EXPIRY, FEED, CONTROL, OUTBOX, STATE, DEAD, WATCH = unpack(KEYS, 2 * #TIERS + 1)
local PREFIX = string.sub(STATE, 1, -7) -- without ":state"
local GROUP = 'workers'
local FEED_LEN, CONTROL_LEN = 10000, 1000
local REQUEUED_FIRST = -1e13 -- added to a due time: in front of every arrival number

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local NOW = now_ms()

local function job_key(id) return PREFIX .. ':job:' .. id end
local function events_key(id) return PREFIX .. ':events:' .. id end
local function notice_key(id) return PREFIX .. ':notice:' .. id end

local TEXTS = { 'status', 'tier', 'entry', 'wanted', 'run_item' }
local NUMBERS = {
  'attempt', 'lost_count', 'num_events', 'cost_tokens', 'created_ms', 'deadline_ms', 'queue_ttl_ms',
  'attempt_timeout_ms', 'committed', 'released', 'prompt_tokens', 'completion_tokens', 'cached_tokens',
  'output_tokens', 'stuck_count', 'lost_tokens',
}
local FIELDS = {}
for _, name in ipairs(TEXTS) do FIELDS[#FIELDS + 1] = name end
for _, name in ipairs(NUMBERS) do FIELDS[#FIELDS + 1] = name end

-- The job's record without its payloads, or nil. Absent numbers are nil.
local function read(id)
  local values = redis.call('HMGET', job_key(id), unpack(FIELDS))
  if not values[1] then return nil end
  local job = { id = id }
  for i, name in ipairs(TEXTS) do job[name] = values[i] or nil end
  for i, name in ipairs(NUMBERS) do job[name] = tonumber(values[#TEXTS + i] or nil) end
  return job
end

-- The job if `attempt` may write to it, else nil and the job as it is.
local function held(id, attempt)
  local job = read(id)
  if job and job.status == 'running' and job.attempt == tonumber(attempt) then return job, job end
  return nil, job
end

local function change(job, what)
  local status = TRANSITIONS[job.status .. ':' .. what]
  if not status then error(job.id .. ' is ' .. job.status .. ': it cannot ' .. what) end
  job.status = status
  return status
end

-- `work.work_left`: prompt and output tokens that a job which is not running has before it.
local function work_left(cost_tokens, output_tokens, num_emitted)
  local left = math.max(0, math.min(output_tokens or 0, cost_tokens) - num_emitted)
  return cost_tokens - left, left
end

-- Adds a waiting job's work to its tier's (`sign` 1), or takes it out (-1).
local function weigh(job, sign)
  local prompt, output = work_left(job.cost_tokens, job.output_tokens, job.completion_tokens)
  redis.call('HINCRBY', STATE, 'prompt:' .. job.tier, string.format('%d', sign * prompt)) -- and not '-0'
  redis.call('HINCRBY', STATE, 'output:' .. job.tier, string.format('%d', sign * output))
end

local function wait(job, order)
  redis.call('ZADD', WAITING[job.tier], order, job.id)
  weigh(job, 1)
end

-- An empty tier has no work, whatever was lost in a failover.
local function wait_no_more(job)
  if redis.call('ZREM', WAITING[job.tier], job.id) == 0 then return end
  if redis.call('ZCARD', WAITING[job.tier]) == 0 then
    redis.call('HDEL', STATE, 'prompt:' .. job.tier, 'output:' .. job.tier)
  else
    weigh(job, -1)
  end
end

-- Where a waiting job of a tier stands: its rank, prompt and output tokens of those ahead, the number of jobs that run in
-- the lane; empty where it does not wait. The first PLACE_LOOKS ahead are counted, the rest are taken as the average of
-- those behind.
local function place(id, tier)
  local rank = redis.call('ZRANK', WAITING[tier], id)
  if not rank then return {} end
  local prompt, output, num_looked = 0, 0, math.min(rank, PLACE_LOOKS)
  for _, other in ipairs(num_looked > 0 and redis.call('ZRANGE', WAITING[tier], 0, num_looked - 1) or {}) do
    local job = redis.call('HMGET', job_key(other), 'cost_tokens', 'output_tokens', 'completion_tokens')
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
  return { rank, prompt, output, num_running }
end

-- `work.Sizes.note`, line by line, for a job that succeeded.
local function note_size(job, fields)
  local asked = math.min(job.output_tokens or 0, job.cost_tokens)
  if asked == 0 then return end
  local output = math.min(tonumber(fields.completion_tokens), asked)
  local new = { 1, tonumber(fields.prompt_tokens), tonumber(fields.cached_tokens), output, asked,
    output * output, output * asked, asked * asked, job.cost_tokens - asked }
  local sums, values = redis.call('HMGET', STATE, unpack(SIZES)), {}
  local is_full = (tonumber(sums[1]) or 0) >= MAX_SIZES
  for i, name in ipairs(SIZES) do
    local known = tonumber(sums[i]) or 0
    values[2 * i - 1] = name
    values[2 * i] = string.format('%d', (is_full and math.floor(known / 2) or known) + new[i])
  end
  redis.call('HSET', STATE, unpack(values))
end

-- Ids whose logs grew in this script; told to the feed once, by `tell_feed`.
local grown, is_grown = {}, {}

-- Appends an event; its id makes the server refuse a number that is there already.
local function append(job, kind, body)
  redis.call('XADD', events_key(job.id), string.format('%d-0', job.num_events + 1), 't', kind, 'ms', NOW, 'b', body)
  job.num_events = job.num_events + 1
  if not is_grown[job.id] then
    is_grown[job.id] = true
    grown[#grown + 1] = job.id
  end
end

local function tell_feed()
  if #grown > 0 then redis.call('XADD', FEED, 'MAXLEN', '~', FEED_LEN, '*', 'j', table.concat(grown, ' ')) end
end

-- Wakes the workers: with the id of a running job that was ended, or with '' as a mere doorbell.
local function tell_workers(id)
  redis.call('XADD', CONTROL, 'MAXLEN', '~', CONTROL_LEN, '*', 'j', id)
end

local function is_end(kind) return TERMINAL[string.sub(kind, 5)] or false end

local function add_notice(job, topic, kind, number)
  local id = string.format('%s-%d-%s', job.id, number, topic)
  local fields = redis.call('HMGET', job_key(job.id), topic == 'webhook' and 'webhook' or 'run_item', 'traceparent')
  redis.call('HSET', notice_key(id), 'job_id', job.id, 'topic', topic, 'event', kind, 'sequence_number', number,
    'created_ms', NOW, 'tries', 0, 'payload', fields[1], 'traceparent', fields[2] or '')
  redis.call('ZADD', OUTBOX, NOW, id)
end

-- Writes to the outbox what the job's last event, `kind`, must tell the outside.
local function notify(job, kind)
  local number = job.num_events - 1
  local wanted = job.wanted
  if wanted and (wanted == '*' and is_end(kind) or string.find(wanted, ',' .. kind .. ',', 1, true)) then
    add_notice(job, 'webhook', kind, number)
  end
  if job.run_item and is_end(kind) then add_notice(job, 'run', kind, number) end
end

-- When the job runs out if nothing else happens; see `endings.expiry_of`.
local function set_expiry(job, attempt_started_ms)
  local at = job.deadline_ms or math.huge
  if job.attempt == 0 and job.queue_ttl_ms then at = math.min(at, job.created_ms + job.queue_ttl_ms) end
  if attempt_started_ms and job.attempt_timeout_ms then
    at = math.min(at, attempt_started_ms + job.attempt_timeout_ms)
  end
  if at == math.huge then redis.call('ZREM', EXPIRY, job.id) else redis.call('ZADD', EXPIRY, at, job.id) end
end

local function usage_of(job)
  return { prompt_tokens = job.prompt_tokens, completion_tokens = job.completion_tokens,
    cached_tokens = job.cached_tokens }
end

-- Ends a job. `body` is the terminal event's (nil: made here, with `failure` as its error); `fields` are added.
local function finish(job, what, body, failure, fields)
  if job.status == 'running' and not fields.committed then tell_workers(job.id) end
  local status = change(job, what)
  if not body then
    local said = { usage = usage_of(job), error = failure }
    if job.attempt > 0 then said.attempt = job.attempt end
    body = cmsgpack.pack(said)
  end
  redis.call('XACK', STREAM[job.tier], GROUP, job.entry)
  redis.call('XDEL', STREAM[job.tier], job.entry)
  wait_no_more(job)
  redis.call('ZREM', DUE, job.id)
  redis.call('ZREM', EXPIRY, job.id)
  redis.call('ZREM', WATCH, job.id)
  if what == 'succeed' then note_size(job, fields) end
  append(job, 'job.' .. status, body)
  notify(job, 'job.' .. status)
  local values = { 'status', status, 'num_events', job.num_events, 'finished_ms', NOW, 'owner', '' }
  if failure then
    values[#values + 1] = 'error'
    values[#values + 1] = cmsgpack.pack(failure)
  end
  for name, value in pairs(fields) do
    values[#values + 1] = name
    values[#values + 1] = value
  end
  redis.call('HSET', job_key(job.id), unpack(values))
  redis.call('PEXPIRE', job_key(job.id), RECORD_MS)
  redis.call('PEXPIRE', events_key(job.id), EVENT_LOG_MS)
  return status
end

-- Ends a job that is past one of its limits: its attempt's as failed, all others as expired.
local function run_out(job)
  if job.status == 'running' and not (job.deadline_ms and job.deadline_ms <= NOW) then
    return finish(job, 'fail', nil, ATTEMPT_TIMEOUT, {})
  end
  return finish(job, 'expire', nil, nil, {})
end

-- `losses.Losses` of a ripe job, line by line: with the lease that a running one has just lost.
local function losses(job)
  local lost_count, stuck_count, lost_tokens = job.lost_count, job.stuck_count or 0, job.lost_tokens or 0
  if job.status ~= 'running' then return lost_count, stuck_count, lost_tokens end
  local is_stuck = job.completion_tokens <= lost_tokens
  return lost_count + 1, is_stuck and stuck_count + 1 or 1, job.completion_tokens
end

local function is_suspect(job)
  local lost_count, stuck_count = losses(job)
  return stuck_count >= SUSPECT_STUCK_COUNT or lost_count >= MAX_LOST_COUNT - 1
end

local function lose(job)
  job.lost_count, job.stuck_count, job.lost_tokens = losses(job)
  redis.call('HSET', job_key(job.id), 'lost_count', job.lost_count, 'stuck_count', job.stuck_count,
    'lost_tokens', job.lost_tokens)
end

-- Fails a job that has lost too many workers, as a dead letter.
local function bury(job)
  lose(job)
  finish(job, 'fail', nil, WORKER_LOST, {})
  redis.call('PEXPIRE', job_key(job.id), DEAD_LETTER_MS)
  redis.call('ZADD', DEAD, NOW, job.id)
  redis.call('ZREMRANGEBYSCORE', DEAD, '-inf', NOW - DEAD_LETTER_MS)
end

local function is_past(score) return score and tonumber(score) <= NOW end

-- True for a job whose lapsed lease was the last it may lose.
local function is_last_lease_lost(job)
  local lost_count, stuck_count = losses(job)
  return job.status == 'running' and (stuck_count >= MAX_STUCK_COUNT or lost_count >= MAX_LOST_COUNT)
end

-- The number of events that a publication brings to the log, from the `first` one's number ('' for the next).
-- Returns how many of its `count` events are there already; nil if it would leave a gap.
local function num_known(job, first)
  first = tonumber(first) or job.num_events
  if first > job.num_events then return nil end
  return job.num_events - first
end

-- Appends the deltas of ARGV from `at` on, four values an event: body, tokens, prompt tokens, cached tokens ('' unsaid).
local function append_deltas(job, at, count, known)
  for i = known, count - 1 do
    local body, tokens, prompt, cached = unpack(ARGV, at + 4 * i, at + 4 * i + 3)
    append(job, 'job.delta', body)
    job.completion_tokens = job.completion_tokens + tonumber(tokens)
    job.prompt_tokens = tonumber(prompt) or job.prompt_tokens
    job.cached_tokens = tonumber(cached) or job.cached_tokens
  end
end
