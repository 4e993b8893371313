"""What `batch-assets backup` and `restore` do and print."""

__all__ = ["backup_command", "restore_command"]
