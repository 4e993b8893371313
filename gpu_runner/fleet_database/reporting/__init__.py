"""What is read of the fleet's tables: `reports` for people and planners, `fleet_figures` for Prometheus."""

__all__ = ["backup_note", "fleet_figures", "reports"]
