"""Full lists for engines that take several inputs a call: embeddings, classification, scores.

Pure: `list_limits` how much one list may hold, and what a server is found to take; `bisection` how a refused list is
cut until the inputs at fault are alone; `list_buffer` when a list of requests that arrive one by one is full, or has
waited long enough. `list_batcher` is the asyncio shell of these. Datasets have a queue that is always full, and use the
first two.
"""

__all__ = ["bisection", "list_batcher", "list_buffer", "list_limits"]
