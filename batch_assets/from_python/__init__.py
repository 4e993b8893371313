"""Datasets that are declared in Python: `python_spec` checks them as a defs.yaml is checked, `frame_files` keeps frames
that they read, `own_location` makes Dagster's definitions of them, `notebook_preview` shows their first rows.
"""

__all__ = ["notebook_preview", "own_location", "python_spec"]
