"""What is read of the fleet's tables: `reports` for people and planners, `fleet_figures` for
Prometheus; `backup_note`, how old the last backup is."""

__all__ = ["backup_note", "fleet_figures", "reports"]
