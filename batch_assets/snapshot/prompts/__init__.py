"""What each row asks: templates, a conversation in a column, and files beside the defs.yaml become a prompt as JSON.

`rendering` makes prompts of rows, `messages` checks a conversation, `images` reads pictures, `files` system texts and
examples, `row_keys` hashes whole requests.
"""

__all__ = ["images", "messages", "rendering", "row_keys"]
