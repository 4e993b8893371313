"""`/v1/batches`: create, retrieve, list, cancel; and how the lines of an input file are checked and kept.

`routes` has the calls, `create` checks what is asked for, `lines` checks one line of a file, `snapshot` checks all
lines and keeps them in parts of 250, as a dataset's prompts are kept, `long_texts` has prompts whose tokens are to
be counted, `redrive` asks for the lines of an ended batch once more.
"""

__all__ = ["create", "lines", "long_texts", "redrive", "routes", "snapshot"]
