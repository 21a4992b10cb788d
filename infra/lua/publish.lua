-- Appends deltas of several jobs. ARGV: number of publications, then of each: job id, attempt, number of its first
-- event ('' the next), number of events, and four values an event (see `append_deltas`).
-- Returns the indexes (from 0) of those refused; an error, nothing written, where one would leave a gap.
local refused, accepted = {}, {}
local at = 2
for i = 0, ARGV[1] - 1 do
  local count = tonumber(ARGV[at + 3])
  local job = held(ARGV[at], ARGV[at + 1])
  if job then
    accepted[#accepted + 1] = { id = ARGV[at], first = ARGV[at + 2], at = at + 4, count = count }
    if not num_known(job, ARGV[at + 2]) then
      return redis.error_reply(string.format('GAP %s %d %s', job.id, job.num_events, ARGV[at + 2]))
    end
  else
    refused[#refused + 1] = i
  end
  at = at + 4 + 4 * count
end
for _, publication in ipairs(accepted) do
  local job = read(publication.id)
  append_deltas(job, publication.at, publication.count, num_known(job, publication.first))
  redis.call('HSET', job_key(job.id), 'num_events', job.num_events, 'prompt_tokens', job.prompt_tokens,
    'completion_tokens', job.completion_tokens, 'cached_tokens', job.cached_tokens)
end
tell_feed()
return refused
