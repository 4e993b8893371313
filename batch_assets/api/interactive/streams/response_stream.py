"""Reads along in a stream of `/v1/responses`: typed events, the last of which holds the whole response. Pure.

Source of the format: openai-python 3.54, `types/responses`: `response.output_text.delta` and others with a `delta`,
then one of `response.completed`, `response.incomplete`, `response.failed`, with `response.usage`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from batch_assets.api.interactive.streams.event_stream import StreamReader, Usage, event_object, read_usage

_LAST = (b'"response.completed"', b'"response.incomplete"', b'"response.failed"')
_DELTA = re.compile(rb'"type"\s*:\s*"response\.[a-z_.]+\.delta"')


class ResponseStream(StreamReader):
    """One response on its way; all bytes go through."""

    def __init__(self, *, on_usage: Callable[[Usage], None] | None = None) -> None:
        super().__init__(on_usage)

    def _passes(self, event: bytes) -> bool:
        self.generating = self.generating or _DELTA.search(event) is not None
        found = event_object(event) if any(name in event for name in _LAST) else None
        kind = None if found is None else found.get("type")
        if found is not None and isinstance(kind, str) and f'"{kind}"'.encode() in _LAST:
            self.done = self.generating = True
            self.usage = read_usage(found.get("response"))
            self._tell(self.usage)
        return True
