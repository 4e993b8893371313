"""How many instances of which offers, decided anew at each tick from prices, speeds, deadline and budget. Pure.

`controller` is where to begin. `planner` finds the cheapest fleet for a finish time (`search`, `knapsack`),
`feasibility` looks ahead, `speed_model` says what a measured speed tells of others.
"""

__all__ = ["controller", "planner", "speed_model", "types"]
