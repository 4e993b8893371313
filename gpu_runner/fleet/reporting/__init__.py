"""What is read of the fleet's tables: `reports` for people and planners, `figures` for Prometheus."""

__all__ = ["figures", "reports"]
