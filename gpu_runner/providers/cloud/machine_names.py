"""Names of machines, as every cloud takes them in a tag, a label or a token."""

from __future__ import annotations

import re

from gpu_runner.providers.base import ProviderError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_PART = re.compile(r"[a-z0-9._-]{0,63}")


def check_machine_name(name: str) -> None:
    """Raises ProviderError for what cannot be a machine's name."""
    if not _NAME.fullmatch(name):
        raise ProviderError(f"machine name: expected {_NAME.pattern}, found {name!r:.80}")


def may_begin_a_name(tag: str) -> bool:
    """Whether any machine's name can start so: what else may stand in a filter of the cloud is never sent to it."""
    return _PART.fullmatch(tag) is not None
