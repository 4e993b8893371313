"""Commands on one dataset: `preview`, `plan`, `run` (`run_summary` prints how it ended), and `status_command`."""

__all__ = ["plan", "preview", "run", "run_summary", "status_command"]
