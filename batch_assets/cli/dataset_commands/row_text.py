"""How rows are printed for people: messages, outputs and errors, cut, and without what could steer a terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batch_assets.snapshot.prompts.messages import words_of

SHOWN_LETTERS = 4000  # of one message or answer
Say = Callable[..., None]  # a text and, where it has one, a style


def plain(text: str) -> str:
    """Without what could steer a terminal: texts of sources and models are not to be trusted."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def indented(text: str, letters: int = SHOWN_LETTERS) -> str:
    """A text below a heading; of a long one the beginning and its length."""
    cut = text if len(text) <= letters else f"{text[:letters]}… ({len(text):,} characters)"
    return "\n".join(f"    {line}" for line in cut.splitlines()) or "    "


def on_one_line(value: Any, letters: int = 80) -> str:
    """A value of a column beside others; of a long one the beginning, and a sign that there is more."""
    text = " ".join(str(value).split())
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def output_text(output: Any) -> str:
    """An output as text; of a vector the first numbers."""
    if isinstance(output, str):
        return output or "(empty)"
    return f"[{', '.join(f'{number:.4g}' for number in output[:5])}, …] {len(output):,} numbers"


def say_prompt(say: Say, prompt: Any, letters: int = SHOWN_LETTERS) -> None:
    """Messages with their roles, a text, or what is scored or ranked."""
    if isinstance(prompt, dict):
        prompt = "\n".join(f"{name}: {text}" for name, text in prompt.items())
    for message in [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt:
        say(f"  {message['role']}", "cyan")
        content = message.get("content")
        said = content if isinstance(content, str) else words_of(message)
        say(indented(said, letters))
