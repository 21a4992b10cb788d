-- Events of several jobs. ARGV: most events of each, then job id and number of the first event wanted of each.
-- Returns of each its entries; 0 where the job is unknown or the log has expired.
local found = {}
for i = 2, #ARGV, 2 do
  local id, first = ARGV[i], tonumber(ARGV[i + 1])
  local entries = redis.call('XRANGE', events_key(id), string.format('%d-0', first + 1), '+', 'COUNT', ARGV[1])
  if #entries == 0 then
    local num_events = tonumber(redis.call('HGET', job_key(id), 'num_events') or nil)
    local is_gone = num_events and num_events > first and redis.call('EXISTS', events_key(id)) == 0
    if not num_events or is_gone then entries = 0 end
  end
  found[#found + 1] = entries
end
return found
