"""Backups of the databases, and what is made of one when everything else is lost.

`databases` says what there is to back up, `copies` copies it without stopping anybody, `backup` puts it into the store,
`schedule` does so by the hour. `restore` puts a backup back, `catch_up` adds what it does not know.
"""

__all__ = ["backup", "catch_up", "copies", "databases", "restore", "schedule"]
