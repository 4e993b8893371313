"""Accepted requests until they are answered, and their results for ten minutes: one protocol, two implementations.

`tasks` has what is kept, `queue_protocol` what a queue does. `embedded` keeps a queue in a file of one process
(`task_table` is what the file holds, `group_commit` its writer), `redis_streams` one that several processes share:
`redis_scripts` are its transactions, `redis_commands` sends many of them at a time, `redis_wakeups` tells who waits for
a result, `redis_checks` says which server is used.
"""

__all__ = ["embedded", "queue_protocol", "redis_commands", "redis_streams", "tasks"]
