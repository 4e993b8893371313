"""Backups of databases in a store of objects: `archive` writes and reads them, `retention` says which ones to keep."""

__all__ = ["archive", "retention"]
