"""Names of models, which become words of an engine's command line."""

from __future__ import annotations


def name_problem(name: str) -> str | None:
    """Why a name cannot be given to `vllm serve` as a word; None when it can."""
    if name.startswith("-"):
        return "it begins with -, so that it would be an option of vllm serve"
    if not name.isprintable() or any(sign.isspace() for sign in name):
        return "it has blanks or control characters in it"
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            return "it has no UTF-8 form"
    return None if name else "it is empty"
