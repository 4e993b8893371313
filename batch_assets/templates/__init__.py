"""Prompt templates: sandboxed Jinja over the columns of a row, bounded in steps and size.

Use `prompt_template`; the other modules are its parts: the sandbox, the filters, what a value may be, and the rewriting
of a parsed template.
"""

__all__ = ["prompt_template"]
