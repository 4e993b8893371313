"""The transactions of the queue in Redis, as Lua scripts. Each touches the keys of one shard only.

Keys of a shard share a hash tag, `batch-assets:{online:07}:…`: `stream` of ids that wait or are claimed, `delayed`
(sorted set by the moment when they are due), `dead` (stream of dead letters) with `dead-ids`, `tenants` (unanswered
tasks by tenant), `task:ID` (a hash: what was asked, state, result), `once:NAME` (Idempotency-Key).

A Redis whose memory is full refuses scripts that write, except those marked `allow-oom`: here all that take out of the
queue what is in it (https://redis.io/docs/latest/develop/interact/programmability/lua-api/). What adds is refused.
"""

from __future__ import annotations

from batch_assets.api.online.queues.redis_commands import script

GROUP = "consumers"
_DRAINS = "#!lua flags=allow-oom\n"

# {id, 1 repeated | 2 key used for another request}; nil: nobody came with this key. Who repeats a request waits for the
# first one's sync, too: WAITAOF waits for what its own connection wrote.
_KNOWN = """
local function known_by(once, fingerprint)
  local known = redis.call('HMGET', once, 'id', 'fingerprint')
  if not known[1] then return false end
  if known[2] ~= fingerprint then return {known[1], 2} end
  redis.call('HSET', once, 'id', known[1])
  return {known[1], 1}
end
"""

# KEYS stream, task, tenants, once ("" for none). ARGV id, tenant, packed, created, fingerprint.
# Returns {id, 0 new | 1 repeated | 2 key used for another request}. Repeatable: an id is appended once.
APPEND = script(
    _KNOWN
    + """
if KEYS[4] ~= '' then
  local known = known_by(KEYS[4], ARGV[5])
  if known then return known end
end
if redis.call('EXISTS', KEYS[2]) == 1 then return {ARGV[1], 0} end
redis.call('HSET', KEYS[2], 'tenant', ARGV[2], 'packed', ARGV[3], 'created', ARGV[4], 'since', ARGV[4],
  'state', 'open', 'failures', 0, 'returned', 0, 'deliveries', 0)
if KEYS[4] ~= '' then
  redis.call('HSET', KEYS[4], 'id', ARGV[1], 'fingerprint', ARGV[5])
  redis.call('HSET', KEYS[2], 'once', KEYS[4])
end
redis.call('XADD', KEYS[1], '*', 'id', ARGV[1])
redis.call('HINCRBY', KEYS[3], ARGV[2], 1)
return {ARGV[1], 0}
"""
)

# KEYS once. ARGV fingerprint. {id, 1 repeated | 2 key used for another request}; nil: nobody came with this key.
KNOWN = script(_DRAINS + _KNOWN + "return known_by(KEYS[1], ARGV[1])")

# KEYS stream. ARGV group. Makes the stream and its consumer group where they are not there yet.
MAKE_GROUP = script(
    _DRAINS
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    if group[2] == ARGV[1] then return 0 end
  end
end
redis.call('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
return 1
"""
)

# KEYS stream, tasks. ARGV group, consumer, their entries. Of each claimed entry what is to be done; nil: nothing, it is
# out of the stream, or another consumer's: this one was silent between its claim and now.
DELIVER = script(
    _DRAINS
    + """
local function delivered(task, entry)
  if redis.call('HGET', task, 'state') ~= 'open' then
    redis.call('XACK', KEYS[1], ARGV[1], entry)
    redis.call('XDEL', KEYS[1], entry)
    return false
  end
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], entry, entry, 1)
  if #pending == 0 or pending[1][2] ~= ARGV[2] then return false end
  local deliveries = redis.call('HINCRBY', task, 'deliveries', 1)
  local found = redis.call('HMGET', task, 'packed', 'failures', 'returned', 'since')
  return {found[1], found[2], found[3], deliveries, found[4]}
end
local found = {}
for number = 2, #KEYS do found[number - 1] = delivered(KEYS[number], ARGV[number + 1]) end
return found
"""
)

MOST_TOLD = 65_536  # bytes of a result that is sent to who waits; of a larger one only the id

# Keeps a result, for so many seconds, and tells who waits for it: the id, and after a line feed the result.
_FINISH = (
    f"""
local told = {MOST_TOLD}
"""
    + """
local function finish(task, tenants, state, id, result, seconds, channels)
  local known = redis.call('HMGET', task, 'tenant', 'waiters', 'once')
  redis.call('HSET', task, 'state', state, 'result', result)
  redis.call('HDEL', task, 'packed', 'waiters')
  redis.call('EXPIRE', task, seconds)
  if known[3] then redis.call('EXPIRE', known[3], seconds) end
  if redis.call('HINCRBY', tenants, known[1], -1) <= 0 then redis.call('HDEL', tenants, known[1]) end
  if not known[2] then return end
  local message = #result <= told and id .. '\\n' .. result or id
  for waiter in string.gmatch(known[2], '[^ ]+') do redis.call('PUBLISH', channels .. waiter, message) end
end
"""
)

# KEYS stream, task, tenants. ARGV group, entry, id, result, seconds kept, channels. 1: stored; 0: there was a result.
ACKNOWLEDGE = script(
    _DRAINS
    + _FINISH
    + """
local stored = 0
if redis.call('HGET', KEYS[2], 'state') == 'open' then
  finish(KEYS[2], KEYS[3], 'done', ARGV[3], ARGV[4], ARGV[5], ARGV[6])
  stored = 1
end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
return stored
"""
)

_OWNED = """
local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)
if #pending == 0 or pending[1][2] ~= ARGV[3] then return 0 end
"""

# KEYS stream, task, delayed. ARGV group, entry, consumer, id, due, which counter.
RETRY = script(
    _DRAINS
    + _OWNED
    + """
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
if redis.call('HGET', KEYS[2], 'state') ~= 'open' then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[6], 1)
redis.call('HSET', KEYS[2], 'deliveries', 0)
redis.call('ZADD', KEYS[3], ARGV[5], ARGV[4])
return 1
"""
)

# KEYS stream, task, tenants, dead, dead-ids. ARGV group, entry, consumer, id, result, seconds, channels, code,
# failures, now. The dead letter has what was asked: the task itself is kept as long as its result.
BURY = script(
    _DRAINS
    + _FINISH
    + _OWNED
    + """
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
if redis.call('HGET', KEYS[2], 'state') ~= 'open' then return 0 end
local known = redis.call('HMGET', KEYS[2], 'tenant', 'packed')
local letter = redis.call('XADD', KEYS[4], '*', 'id', ARGV[4], 'tenant', known[1], 'packed', known[2], 'code', ARGV[8],
  'failures', ARGV[9], 'died', ARGV[10])
redis.call('HSET', KEYS[5], ARGV[4], letter)
finish(KEYS[2], KEYS[3], 'dead', ARGV[4], ARGV[5], ARGV[6], ARGV[7])
return 1
"""
)

# KEYS stream. ARGV group, consumer, entries. Their idle time begins anew, where they are still this consumer's.
EXTEND = script(
    _DRAINS
    + """
local kept = 0
for number = 3, #ARGV do
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[number], ARGV[number], 1)
  if #pending == 1 and pending[1][2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[number], 'JUSTID')
    kept = kept + 1
  end
end
return kept
"""
)

# KEYS stream. ARGV group, consumer, milliseconds, most. Flat: entry, id, entry, id, …
RECLAIM = script(
    _DRAINS
    + """
local taken = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], '0-0', 'COUNT', ARGV[4])
local found = {}
for _, entry in ipairs(taken[2]) do
  if entry[2] then
    found[#found + 1] = entry[1]
    found[#found + 1] = entry[2][2]
  end
end
return found
"""
)

# KEYS task. ARGV who waits ("" for nobody), tenant ("" for any). {tenant, created, result}; nil: there is no such task.
LOOK = script(
    _DRAINS
    + """
local found = redis.call('HMGET', KEYS[1], 'tenant', 'created', 'result', 'waiters')
if not found[1] or (ARGV[2] ~= '' and found[1] ~= ARGV[2]) then return false end
if not found[3] and ARGV[1] ~= '' then
  local waiters = found[4] or ''
  if not string.find(' ' .. waiters .. ' ', ' ' .. ARGV[1] .. ' ', 1, true) and #waiters < 512 then
    redis.call('HSET', KEYS[1], 'waiters', waiters .. ' ' .. ARGV[1])
  end
end
return {found[1], found[2], found[3]}
"""
)

# KEYS stream, delayed, dead, dead-ids. ARGV now, most, letters older than this id go. Returns how many are due now.
SWEEP = script(
    _DRAINS
    + """
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, id in ipairs(due) do
  redis.call('ZREM', KEYS[2], id)
  redis.call('XADD', KEYS[1], '*', 'id', id)
end
for _, letter in ipairs(redis.call('XRANGE', KEYS[3], '-', ARGV[3], 'COUNT', ARGV[2])) do
  redis.call('XDEL', KEYS[3], letter[1])
  redis.call('HDEL', KEYS[4], letter[2][2])
end
return #due
"""
)

# KEYS stream. ARGV group, milliseconds. Forgets consumers without claims that were not heard of for so long. A consumer
# that lives is made anew by its next claim.
FORGET_CONSUMERS = script(
    _DRAINS
    + """
local gone = 0
for _, listed in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for number = 1, #listed, 2 do consumer[listed[number]] = listed[number + 1] end
  if consumer['pending'] == 0 and consumer['idle'] >= tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer['name'])
    gone = gone + 1
  end
end
return gone
"""
)

# KEYS stream, delayed, dead, tenants. ARGV group. {in the stream, claimed, delayed, dead, tenants}.
DEPTH = script(
    _DRAINS
    + """
local claimed = redis.call('XPENDING', KEYS[1], ARGV[1])[1]
return {redis.call('XLEN', KEYS[1]), claimed, redis.call('ZCARD', KEYS[2]), redis.call('XLEN', KEYS[3]),
  redis.call('HGETALL', KEYS[4])}
"""
)

# KEYS dead. ARGV most. {id, the packed task without what was asked, code, failures, died}, newest first.
DEAD_LETTERS = script(
    _DRAINS
    + """
local found = {}
for _, letter in ipairs(redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', ARGV[1])) do
  local fields = {}
  for number = 1, #letter[2], 2 do fields[letter[2][number]] = letter[2][number + 1] end
  local head = string.match(fields['packed'] or '', '^[^\\n]*')
  found[#found + 1] = {fields['id'], head, fields['code'], fields['failures'], fields['died']}
end
return found
"""
)

# KEYS stream, task, tenants, dead, dead-ids. ARGV id, now. 1: it is back in the queue. The letter says when it was
# created, where Redis has forgotten the task.
REDRIVE = script("""
local letter = redis.call('HGET', KEYS[5], ARGV[1])
if not letter then return 0 end
local found = redis.call('XRANGE', KEYS[4], letter, letter)[1]
redis.call('HDEL', KEYS[5], ARGV[1])
if not found then return 0 end
redis.call('XDEL', KEYS[4], letter)
local fields = {}
for number = 1, #found[2], 2 do fields[found[2][number]] = found[2][number + 1] end
local read, head = pcall(cjson.decode, string.match(fields['packed'] or '', '^[^\\n]*'))
local created = redis.call('HGET', KEYS[2], 'created')
if not created and read and type(head) == 'table' and type(head['created_at']) == 'number' then
  created = string.format('%.17g', head['created_at'])
end
created = created or ARGV[2]
redis.call('HSET', KEYS[2], 'tenant', fields['tenant'], 'packed', fields['packed'], 'created', created,
  'since', ARGV[2], 'state', 'open', 'failures', 0, 'returned', 0, 'deliveries', 0)
redis.call('HDEL', KEYS[2], 'result')
redis.call('PERSIST', KEYS[2])
local once = redis.call('HGET', KEYS[2], 'once')
if once then redis.call('PERSIST', once) end
redis.call('XADD', KEYS[1], '*', 'id', ARGV[1])
redis.call('HINCRBY', KEYS[3], fields['tenant'], 1)
return 1
""")
