"""The engines that serve a model for the service's batches: `engine_supply` says what an engine is and names running
ones, `fleet_engines` leases from the fleet; `engine_slots` is how many engines a model's feed has; `token_counts` asks
engines how long texts are, `engine_wait` is what a feed without an engine waits for.
"""

__all__ = ["engine_slots", "engine_supply", "engine_wait", "fleet_engines", "token_counts"]
