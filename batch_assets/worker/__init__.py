"""Rows on their way from a source to committed objects, whoever has asked for them: a dataset, or an OpenAI batch.

A part is up to 250 rows that are committed as one object: a batch of a dataset, or that many lines of an OpenAI batch.
`job_worker` brings the rows of jobs through a feed, into journals and objects; `part_journal` keeps finished rows of
parts that are not committed.
"""

__all__ = ["job_worker", "part_journal"]
