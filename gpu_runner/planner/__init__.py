"""How many instances of which offers, decided anew at each tick from prices, speeds, deadline and budget. Pure.

`controller` is where to begin: each tick begins there. `feasibility` is where the deadline decides: which fleet is good
enough for it, and whether the one that is held is. `planner` finds the cheapest fleet for a finish time (`search`,
`knapsack`), `exploration` what to rent while speeds are only estimated, `budget` what can be paid for; `speed_model`
says what a measured speed tells of others; `planned_fleet` and `command` are what they put together and answer.
"""

__all__ = [
    "budget",
    "command",
    "controller",
    "feasibility",
    "planned_fleet",
    "planner",
    "search",
    "speed_model",
    "types",
]
