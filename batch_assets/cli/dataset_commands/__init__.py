"""Commands on one dataset: `declare` (for `new` and `check`), `preview`, `plan`, `run` (`run_summary` prints how it
ended), and `status_command`.
"""

__all__ = ["declare", "plan", "preview", "regenerate", "run", "run_summary", "show", "status_command"]
