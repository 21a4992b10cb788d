-- Live workers. KEYS: an alias's workers. Returns of each its age (ms) and record.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = {}
for _, told in ipairs(redis.call('HVALS', KEYS[1])) do
  local at_ms, until_ms, record = string.match(told, '^(%d+) (%d+) (.*)$')
  if tonumber(until_ms) > now then
    found[#found + 1] = now - at_ms
    found[#found + 1] = record
  end
end
return found
