"""Rows on their way from a source to committed objects, whoever has asked for them: a dataset, or an OpenAI batch.

A part is up to 250 rows that are committed as one object: a batch of a dataset, or that many lines of an OpenAI batch.
`part_journal` keeps finished rows of parts that are not committed.
"""

__all__ = ["part_journal"]
