"""Answers that an engine streams, read along while they are passed through. Pure.

`event_stream` reads those of chats and completions, `response_stream` those of `/v1/responses`.
"""

__all__ = ["event_stream", "response_stream"]
