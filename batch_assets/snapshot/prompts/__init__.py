"""What each row asks: templates, a conversation in a column, and files beside the defs.yaml become a prompt as JSON.

`rendering` makes prompts of rows, `messages` checks a conversation, `row_media` reads files of rows, which
`images` and `audio` hold to their limits, `files` system texts and examples, `row_keys` hashes whole requests.
"""

__all__ = ["audio", "files", "images", "messages", "rendering", "row_keys"]
