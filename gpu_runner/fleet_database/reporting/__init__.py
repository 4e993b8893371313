"""What is read of the fleet's tables: `reports` for people and planners, `fleet_figures` for Prometheus."""

__all__ = ["fleet_figures", "reports"]
