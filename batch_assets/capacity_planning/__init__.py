"""What the planner is asked about a dataset or a model, and how its answer is shown.

`planner_input` puts the question together, `workload_estimate` says how much work is left, `cost_curve` draws cost
against time. `capacity_question` has it answered, for the capacity sensor and for the service; `decision` is one answer
and how it is told; `standing_engines` adds engines that are not rented; `acceptance` says how many rows are made until
so many are accepted. The planner itself is `gpu_runner.planner`.
"""

__all__ = [
    "acceptance",
    "capacity_question",
    "clock_scale",
    "cost_curve",
    "decision",
    "planner_input",
    "preview_rows",
    "standing_engines",
    "token_count",
    "workload_estimate",
]
