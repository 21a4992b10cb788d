"""What must change together in a run: one Lua script each. All keys of a run share one slot."""

from __future__ import annotations

from infra.states import TERMINAL

_CLOCK = """
local t = redis.call('TIME')
local now_ms = t[1] * 1000 + math.floor(t[2] / 1000)
"""

_ENDED = f"""
local function ended(status)
  return {" or ".join(f"status == '{status}'" for status in sorted(TERMINAL))}
end
"""

# KEYS: run, sources, open. ARGV: record, then the sources in order. Returns 1 where it is new, else 0.
# The only script that memory's end may refuse: the others free what this one took.
CREATE = f"""#!lua
{_CLOCK}
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'record', ARGV[1], 'status', 'queued', 'num_documents', #ARGV - 1, 'created_ms', now_ms,
  'unfed', #ARGV - 1)
for i = 2, #ARGV do
  redis.call('HSET', KEYS[2], i - 2, ARGV[i])
  redis.call('ZADD', KEYS[3], i - 2, i - 2)
end
return 1
"""

# KEYS: run, states, versions, texts, open, fed, unfed.
# ARGV: number, version read, new state, 1 where it is terminal, window, items still to be fed, then three counted
# lists: items fed, items settled, and texts as item, text, item, text.
UPDATE = f"""#!lua flags=allow-oom
{_CLOCK}{_ENDED}
local status = redis.call('HGET', KEYS[1], 'status')
if not status or ended(status) then return 'closed' end
local number = ARGV[1]
if (redis.call('HGET', KEYS[3], number) or '0') ~= ARGV[2] then return 'stale' end
local at = 7
local function list()
  local count = tonumber(ARGV[at])
  local items = {{}}
  for i = 1, count do items[i] = ARGV[at + i] end
  at = at + count + 1
  return items
end
local fed, settled, texts = list(), list(), list()
local room = tonumber(ARGV[5]) - redis.call('SCARD', KEYS[6])
for _, item in ipairs(settled) do
  if redis.call('SISMEMBER', KEYS[6], number .. ':' .. item) == 1 then room = room + 1 end
end
if #fed > 0 and #fed > room then return 'full' end
for _, item in ipairs(settled) do redis.call('SREM', KEYS[6], number .. ':' .. item) end
for _, item in ipairs(fed) do redis.call('SADD', KEYS[6], number .. ':' .. item) end
for i = 1, #texts, 2 do redis.call('HSET', KEYS[4], number .. ':' .. texts[i], texts[i + 1]) end
redis.call('HSET', KEYS[2], number, ARGV[3])
redis.call('HINCRBY', KEYS[1], 'unfed', ARGV[6] - (redis.call('HGET', KEYS[7], number) or 1))
redis.call('HSET', KEYS[7], number, ARGV[6])
redis.call('HINCRBY', KEYS[3], number, 1)
if ARGV[4] == '1' then redis.call('ZREM', KEYS[5], number) end
redis.call('HINCRBY', KEYS[1], 'sequence_number', 1)
if status == 'queued' then redis.call('HSET', KEYS[1], 'status', 'running', 'started_ms', now_ms) end
return 'yes'
"""

# KEYS: all keys of the run, `run` first. ARGV: status, error or '', output or '', seconds to keep.
FINISH = f"""#!lua flags=allow-oom
{_CLOCK}{_ENDED}
local status = redis.call('HGET', KEYS[1], 'status')
if not status or ended(status) then return 0 end
redis.call('HSET', KEYS[1], 'status', ARGV[1], 'finished_ms', now_ms)
redis.call('HINCRBY', KEYS[1], 'sequence_number', 1)
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'error', ARGV[2]) end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'output', ARGV[3]) end
for i = 1, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return 1
"""

# KEYS: clock. ARGV: run id, delay in ms. The earlier of the two times stands.
WAKE = f"""#!lua flags=allow-oom
{_CLOCK}
redis.call('ZADD', KEYS[1], 'LT', now_ms + ARGV[2], ARGV[1])
return 1
"""

# KEYS: clock. ARGV: run id, delay in ms. Only for a run that is in the clock.
DELAY = f"""#!lua flags=allow-oom
{_CLOCK}
redis.call('ZADD', KEYS[1], 'XX', now_ms + ARGV[2], ARGV[1])
return 1
"""

# KEYS: clock. ARGV: limit, ms to hide what is taken.
TAKE_DUE = f"""#!lua flags=allow-oom
{_CLOCK}
local ids = redis.call('ZRANGE', KEYS[1], '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, ARGV[1])
for _, id in ipairs(ids) do redis.call('ZADD', KEYS[1], now_ms + ARGV[2], id) end
return ids
"""


# KEYS: hashes of a run. Returns of each its names and values in turn.
# A transaction would do, but the server refuses it when memory is full.
READ = """#!lua flags=allow-oom
local found = {}
for i, key in ipairs(KEYS) do found[i] = redis.call('HGETALL', key) end
return found
"""

# KEYS: hashes of a run. ARGV: names of fields. Returns of each the values.
READ_FIELDS = """#!lua flags=allow-oom
local found = {}
for i, key in ipairs(KEYS) do found[i] = redis.call('HMGET', key, unpack(ARGV)) end
return found
"""
