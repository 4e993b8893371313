"""Published tables as training files: `export` writes them, part by part, and goes on after a kill.

`training_formats` turns lines of a table into records of a format, `options` says what is exported and how, `record` is
what lies beside the files, `file_writers` writes one part, and `ranked_pairs` pairs answers for preference.
"""

__all__ = ["export", "options", "record", "training_formats"]
