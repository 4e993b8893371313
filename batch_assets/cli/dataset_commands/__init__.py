"""Commands on one dataset: `declare` (for `new` and `check`), `preview`, `plan`, `run` (`run_summary` prints how it
ended, `run_chain` does several), and `status_command`.
`declared_changes` says how many rows a run would ask that the snapshot does not.
"""

__all__ = [
    "declare",
    "declared_changes",
    "export_command",
    "plan",
    "plan_chain",
    "preview",
    "regenerate",
    "run",
    "run_chain",
    "run_summary",
    "show",
    "status_command",
    "view",
]
