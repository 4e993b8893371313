"""Row keys of many prompts of one dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import orjson

from gpu_runner.rows import Generation

_SORTED = orjson.OPT_SORT_KEYS
_MOST_KEPT = 1024
_PROMPT = "prompt"


class RowKeys:
    """`gpu_runner.rows.row_key` for many prompts: all of the request but the prompt is encoded once."""

    def __init__(self, generation: Generation) -> None:
        fields = generation.key_fields()
        before = {name: fields[name] for name in fields if name < _PROMPT}
        self._before = orjson.dumps(before, option=_SORTED)[:-1] + b',"prompt":'
        self._generation = generation
        self._after: dict[bytes, bytes] = {}

    def digests(
        self,
        prompts: Sequence[bytes],
        fields: Sequence[bytes] | None = None,
        turns: Sequence[Sequence[str]] | None = None,
        user_systems: Sequence[str] | None = None,
    ) -> list[bytes]:
        """Sha256 of each request; `prompts` are JSON with sorted keys. `fields`: request fields of each row's own, as
        JSON objects, or empty. `turns`: what the user says in each row's conversation. `user_systems`: who the
        model that writes the rest of it is to be."""
        if turns is not None:
            own = fields or [b""] * len(prompts)
            ends = [self._end_with(self._end(one), said) for one, said in zip(own, turns, strict=True)]
            if user_systems is not None:
                named = [b',"user_system":' + orjson.dumps(one) + b"}" for one in user_systems]
                ends = [end[:-1] + user for end, user in zip(ends, named, strict=True)]
            return [hashlib.sha256(self._before + p + end).digest() for p, end in zip(prompts, ends, strict=True)]
        sha256, before, after = hashlib.sha256, self._before, self._end(b"")
        if fields is None:
            return [sha256(before + prompt + after).digest() for prompt in prompts]
        return [sha256(before + prompt + self._end(own)).digest() for prompt, own in zip(prompts, fields, strict=True)]

    @staticmethod
    def _end_with(end: bytes, turns: Sequence[str]) -> bytes:
        return end if len(turns) < 2 else end[:-1] + b',"turns":' + orjson.dumps(turns) + b"}"

    def _end(self, fields: bytes) -> bytes:
        found = self._after.get(fields)
        if found is None:
            key = self._generation.with_fields(fields).key_fields()
            after = {name: value for name, value in key.items() if name > _PROMPT}
            found = b"," + orjson.dumps(after, option=_SORTED)[1:]
            if len(self._after) < _MOST_KEPT:
                self._after[fields] = found
        return found
