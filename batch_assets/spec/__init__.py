"""What a user declares: the YAML of a dataset as pydantic models, its errors in plain words, deadlines, schedules.

`models` is where to begin, `source` says where rows come from, `hardware` what may be rented, `gates` when bad rows
pause it, `media` which images and sounds they hold, `row_rules` which rows of the table pass, `judge` what a model says
of another dataset's rows, `exports` which files are made of them, `export_options` how, `condition_types` which types
the columns have that conditions look at.
`request_options` is what one request wants beyond the spec: its tags, and `endpoint_limits` what it may ask of its
endpoint. `discovery` finds the datasets of a project and the files that are broken, `last_known` is what those declared
before, `scaffold` writes a new one. Nothing here reads a row or asks Dagster anything.
"""

__all__ = [
    "chain",
    "condition_types",
    "cron",
    "deadline",
    "defs_files",
    "discovery",
    "endpoint_limits",
    "errors",
    "export_options",
    "exports",
    "gates",
    "hardware",
    "judge",
    "last_known",
    "media",
    "models",
    "plain_words",
    "request_options",
    "row_rules",
    "sampling",
    "sampling_values",
    "scaffold",
    "source",
]
