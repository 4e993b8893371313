"""A new dataset, or a chain of them: a file that can be run as it is, to be changed into what is needed."""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batch_assets.spec.discovery import COMPONENT, declarations, defs_folder
from batch_assets.spec.errors import Problem, SpecError
from batch_assets.spec.models import load_spec
from resources.yaml_files import dump


def _asked(max_tokens: int) -> dict[str, Any]:
    """The model, which does not think before it answers: it would be cut at `max_tokens`."""
    sampling = {"temperature": 0.7, "max_tokens": max_tokens, "chat_template_kwargs": {"enable_thinking": False}}
    return {"model": "Qwen/Qwen3-0.6B", "sampling": sampling}


def first_attributes(name: str) -> dict[str, Any]:
    """The attributes of a new dataset: a grid of two short lists, so that it runs without a file."""
    return {
        "name": name,
        "description": "One sentence per topic and tone.",
        "source": {"grid": {"topic": ["rain", "rivers"], "tone": ["plain", "cheerful"]}},
        "prompt": {"user": "Write one {{ tone }} sentence about {{ topic }}."},
        **_asked(64),
        "output": {"reasoning_tags": "auto"},
        "keep_columns": ["topic", "tone"],
    }


def chain_attributes(name: str) -> list[dict[str, Any]]:
    """The attributes of a new chain, one dataset a step: questions on topics, an answer to each, and the best answer of
    each topic. The last one has the name."""
    schema = {
        "type": "object",
        "properties": {"questions": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}},
        "required": ["questions"],
        "additionalProperties": False,
    }
    shared = _asked(256)
    questions, answers = f"{name}_questions", f"{name}_answers"
    return [
        {
            "name": questions,
            "description": "Two questions on each topic.",
            "source": {"grid": {"topic": ["rain", "rivers"]}},
            "id": "topic",
            "prompt": {"user": "Two questions about {{ topic }}, as JSON."},
            "output": {"json_schema": schema},
            "keep_columns": ["topic"],
            **shared,
        },
        {
            "name": answers,
            "description": "An answer to each question.",
            "source": {"dataset": questions, "explode": "output.questions"},
            "prompt": {"user": "{{ questions }}"},
            "keep_columns": ["topic", "questions"],
            **shared,
        },
        {
            "name": name,
            "description": "The best answer of each topic.",
            "source": {"dataset": answers, "rename": {"output": "answer"}, "group_by": ["topic"]},
            "prompt": {
                "user": "Which answer is best?\n"
                "{% for one in answer %}\n"
                "{{ loop.index }}. {{ questions[loop.index0] }} {{ one }}\n"
                "{% endfor %}"
            },
            "keep_columns": ["answer"],
            **shared,
        },
    ]


def document_text(declared: Sequence[Mapping[str, Any]]) -> str:
    """A file that declares these datasets, in documents that `---` divides."""
    return "---\n".join(dump({"type": COMPONENT, "attributes": dict(one)}) for one in declared)


def write_dataset(name: str, *, chain: bool = False) -> Path:
    """Write `NAME/defs.yaml`, with `chain` of three datasets, into the folder of the datasets; returns its path.

    Raises SpecError, and OSError.
    """
    file = defs_folder() / name / "defs.yaml"
    declared = chain_attributes(name) if chain else [first_attributes(name)]
    known = declarations().datasets
    for attributes in declared:
        spec = load_spec(attributes, file)
        if taken := known.get(spec.name):
            found = f"{spec.name!r}, which lies in {taken[1]}"
            raise SpecError(file, [Problem("name", "one that no dataset has", found)])
    text = document_text(declared)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x") as new:
            new.write(text)
    except FileExistsError:
        raise SpecError(file, [Problem("this file", "none of this name", "one; it is left as it is")]) from None
    # What the command line makes is for its user alone; this belongs to the project around it.
    mode = stat.S_IMODE(defs_folder().stat().st_mode)
    file.parent.chmod(mode)
    file.chmod(mode & 0o666)
    return file
