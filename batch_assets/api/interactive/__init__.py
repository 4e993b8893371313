"""Interactive requests: chats, completions, embeddings and responses, sent on to an engine that is there anyway.

`routes` has the routes, `proxy` sends a request on and passes the answer through, `engine_directory` knows which
engines serve which model, `replica_engines` finds those that other replicas lease, `engine_choice` knows which of them
gets a request, `engine_reports` what they say of their load, `cache_salt` keeps tenants apart in vLLM's prefix cache,
`embedding_lists` collects texts of many callers to lists, `boot_wait` lets requests wait for the first engine. Pure:
`request_body` reads and prepares a request, `engine_errors` says what an engine's error means, `event_stream` reads
along in a streamed answer, `first_tokens` remembers how long first tokens took, for the batches that give way.
"""

__all__ = [
    "boot_wait",
    "cache_salt",
    "embedding_lists",
    "engine_choice",
    "engine_directory",
    "engine_errors",
    "engine_reports",
    "event_stream",
    "first_tokens",
    "proxy",
    "replica_engines",
    "request_body",
    "routes",
    "shared_supply",
]
