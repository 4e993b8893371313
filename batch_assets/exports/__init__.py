"""Published tables as training files: `export` writes them, part by part, and goes on after a kill.

`declared_export` writes those of a defs.yaml. `training_formats` turns lines of a table into records of a format,
`record` is what lies beside the files, `file_writers` writes one part, and `ranked_pairs` pairs answers for preference.
`delta_table` writes a Delta table. `pushed_export` brings an export with its card (`hub_card`) to the Hugging Face hub
(`hub_push`).
"""

__all__ = ["declared_export", "export", "file_writers", "hub_push", "pushed_export", "record", "training_formats"]
