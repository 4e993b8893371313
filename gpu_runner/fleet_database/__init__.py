"""The fleet in SQL: which runs live, who holds which instance until when, what each instance cost.

`database` is where to begin; its transactions are in `leases`, `instances`, `targets`, `claims` and `services`.
`reaper` makes what is rented agree with it; `accounting` says what a bill was for and what may still be spent, and
`reporting` what is read of it; `after_restore` trusts nothing of a backup.
"""

__all__ = [
    "accounting",
    "after_restore",
    "capacity_plan",
    "clock_jumps",
    "database",
    "heartbeat",
    "reaper",
    "reporting",
    "services",
    "tables",
    "targets",
    "wait_reason",
]
