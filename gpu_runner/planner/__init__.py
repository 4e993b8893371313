"""How many instances of which offers, decided anew at each tick from prices, speeds, deadline and budget. Pure.

`controller` is where to begin. `planner` finds the cheapest fleet for a finish time (`search`, `knapsack`),
`feasibility` looks ahead, `speed_model` says what a measured speed tells of others; `fleet` and `command` are what they
put together and answer.
"""

__all__ = ["budget", "command", "controller", "feasibility", "fleet", "planner", "search", "speed_model", "types"]
