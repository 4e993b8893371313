"""What each row asks: templates, a conversation in a column, and files beside the defs.yaml become a prompt as JSON.

`rendering` makes prompts of rows, `messages` checks a conversation, `files` reads system texts and examples, `row_keys`
hashes whole requests.
"""

__all__ = ["messages", "rendering", "row_keys"]
