"""What `batch-assets backup`, `restore` and `gc` do and print."""

__all__ = ["backup_command", "gc_command", "restore_command"]
