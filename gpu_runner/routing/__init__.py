"""Which of several engines gets the next request: the one of which the earliest first token is predicted.

The service asks it for each request that does not belong to a batch; benchmarks/routing.py compares it with simpler
rules. `FORGETTING` of `latency_model` was chosen on seeds 1 and 2 of that benchmark, `fullness_weight` of
`RoutingPolicy` on seeds 1, 2 and 3.

Pure, clock and randomness are arguments. `router` decides; `latency_model` predicts first tokens and the time of each
token of one engine, learned online with `least_squares`; `engine_view` is what the router knows of an engine now;
`prefix_index` guesses how much of a prompt an engine has cached; `output_length` how long an answer will be;
`latency_target` is what a caller asks for; `router` knows how far away engines are, too.
"""

__all__ = ["engine_view", "latency_model", "latency_target", "output_length", "prefix_index", "router"]
