"""Asks once for what is asked twice: requests in flight are collapsed, answers are kept for five minutes.

`answer_cache` keeps answers in this process, `redis_cache` in Redis. `collapse` puts a cache before a dispatcher.
"""

__all__ = ["answer_cache", "collapse", "redis_cache"]
