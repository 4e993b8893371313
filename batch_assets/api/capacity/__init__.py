"""How many engines a model's open batches may have: their windows and budgets on the way to the planner.

`windows` makes one question of many windows, `early_speeds` says what to ask before a speed is measured, `line_lengths`
how long lines are, `backlog` puts these together from the records, `capacity` asks the planner and commands the fleet,
as the capacity sensor does for datasets. `fleet_claim` keeps other services from it. `never_served` says which models
nothing of the fleet can serve.
"""

__all__ = ["backlog", "capacity", "fleet_claim", "never_served"]
