"""Structured outputs beside JSON schemas: one of `choice`, `regex` and `grammar`, by vLLM's names. Pure.

They are sent as vLLM's `structured_outputs` (0.12 and later, which ignores the former `guided_…` fields in silence). An
answer is held against `choice` and `regex` on return; a grammar is the engine's affair alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jsonschema_rs
import orjson

from gpu_runner.client.json_schemas.output_schema import Check, compile_check
from gpu_runner.rows import Generation

MAX_PATTERN = 2_000
MAX_MATCHED = 100_000
# The automaton of a pattern in bytes: an output of MAX_MATCHED characters then takes a second at the very worst.
_PATTERNS = jsonschema_rs.RegexOptions(size_limit=1 << 18, dfa_size_limit=1 << 20)
_META = re.compile(r"[\\.^$*+?{}\[\]()|]")  # what is more than itself in a regular expression
_VLLM = ("vllm", "simulated")  # `owned_by` in the list of models


class UnusablePattern(ValueError):
    """A regular expression that is none, or that no engine matches in linear time."""


def compile_pattern(pattern: str) -> Check:
    """A function that says what is wrong with an output that has to match as a whole, or None.

    Matches in time that is linear in the output: without look-around and back-references, which engines do not take
    either. Raises UnusablePattern.
    """
    try:
        # By itself, too: as a part of a longer one "a)|(b" would match more than a whole output.
        for one in (pattern, f"^(?:{pattern})$"):
            schema = {"type": "string", "pattern": one}
            validator = jsonschema_rs.validator_for(schema, offline=True, pattern_options=_PATTERNS)
    except (jsonschema_rs.ValidationError, ValueError, TypeError) as error:
        raise UnusablePattern(pattern[:80]) from error

    def check(text: str) -> str | None:
        if len(text) > MAX_MATCHED:
            return f"expected at most {MAX_MATCHED:,} characters, found {len(text):,}"
        return None if validator.is_valid(text) else "it does not match the pattern"

    return check


def compile_choice(choices: Sequence[str]) -> Check:
    """A function that says what is wrong with an output that has to be one of these texts, or None."""
    wanted = frozenset(choices)
    return lambda text: None if text in wanted else f"it is none of the {len(wanted)} choices"


def output_check(generation: Generation) -> Check | None:
    """What outputs are held against; None: nothing. Raises ValueError for a schema or pattern that is wrong."""
    if generation.json_schema is not None:
        return compile_check(generation.json_schema)
    structured = generation.structured_outputs or {}
    if "choice" in structured:
        return compile_choice(structured["choice"])
    return compile_pattern(structured["regex"]) if "regex" in structured else None


def server_problem(generation: Generation, owner: str) -> str | None:
    """Why a server that is no llama.cpp cannot do what is asked for, by `owned_by` in its list of models; or None.

    Servers ignore fields that they do not know, so that every row would be free text.
    """
    if not generation.structured_outputs or owner.lower() in _VLLM:
        return None
    (name,) = generation.structured_outputs
    return (
        f"output.{name}: expected vLLM, which takes the request field structured_outputs, found a server of "
        f"{owner[:40] or 'nobody'}, which may ignore it. Use output.json_schema, or another engine"
    )


def sglang_generation(generation: Generation) -> Generation:
    """The same with SGLang's request fields (its documentation, structured_outputs): `regex`, of which a choice is one,
    and `ebnf`.
    """
    structured = generation.structured_outputs
    if not structured:
        return generation
    fields = {"ebnf": structured["grammar"]} if "grammar" in structured else {"regex": structured.get("regex")}
    if "choice" in structured:
        fields = {"regex": "|".join(f"({_META.sub(_escaped, text)})" for text in structured["choice"])}
    return replace(generation, structured_outputs=None, sampling={**generation.sampling, **fields})


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[0]}"


def llama_cpp_fields(structured: Mapping[str, Any]) -> dict[str, Any]:
    """The same as request fields of llama.cpp, whose grammars are GBNF. Raises ValueError for a regular expression."""
    if "grammar" in structured:
        return {"grammar": structured["grammar"]}
    if "choice" in structured:  # a literal of GBNF has the escapes of one of JSON that is not written in ASCII
        return {"grammar": "root ::= " + " | ".join(orjson.dumps(text).decode() for text in structured["choice"])}
    raise ValueError("output.regex: llama.cpp has grammars and JSON schemas only")
