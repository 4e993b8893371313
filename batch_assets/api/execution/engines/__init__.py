"""The engines that serve a model for the service's batches: `engine_supply` says what an engine is, names running ones,
and what a feed without one waits for; `fleet_engines` leases from the fleet; `engine_slots` is how many engines a
model's feed has; `token_counts` asks engines how long texts are.
"""

__all__ = ["engine_slots", "engine_supply", "fleet_engines", "token_counts"]
