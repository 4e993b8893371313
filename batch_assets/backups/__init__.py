"""Backups of the databases, and what is made of one when everything else is lost.

`databases` says what there is to back up, `copies` copies it without stopping anybody, `backup` puts it into the store,
`schedule` does so by the hour.
"""

__all__ = ["backup", "copies", "databases", "schedule"]
