"""One bad row is one dead letter: exactly the poisoned rows are dead, every other row completes."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.timing import SOAK

from e2e.harness import eventually, platform, shared_data
from e2e.test_losses import published

pytestmark = [pytest.mark.soak("losses"), pytest.mark.timeout(900)]

# What the engine does with a poisoned row, and the error code that its dead letter must carry.
KINDS = {
    "too_long": "context_length_exceeded",
    "http_429": "http_429",
    "http_500": "http_500",
    "http_503": "http_503",
    "hang": "timeout",
    "reset": "connection_lost",
    "reset_mid_body": "connection_lost",
    "garbage": "garbage_body",
    "broken_finish": "unfinished",
    "wrong_json": "schema_invalid",
}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "why": {"type": "string"}},
    "required": ["answer", "why"],
    "additionalProperties": False,
}


def poisoned_source(folder: Path, rows: int, kinds: list[str]) -> tuple[Path, dict[str, str]]:
    """The first `rows` questions, 1 % of them poisoned with each kind; also id → kind."""
    lines = (shared_data() / "gsm8k" / "train.jsonl").read_text().splitlines()[:rows]
    poison: dict[str, str] = {}
    file = folder / "questions.jsonl"
    with file.open("w") as out:
        for number, line in enumerate(lines):
            kind = kinds[number % 100] if number % 100 < len(kinds) else ""
            if kind:
                poison[str(number)] = kind
            marker = f" <<{kind}>>" if kind else ""
            out.write(json.dumps({"number": number, "question": json.loads(line)["question"] + marker}) + "\n")
    return file, poison


def spec(source: Path, schema: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "name": "poisoned",
        "source": {"path": str(source)},
        "id": "number",
        "prompt": {"user": "{{ question }}"},
        "sampling": {"max_tokens": 300},
        "checks": {"max_dead_rate": 0.2},
        **({"output": {"json_schema": schema}} if schema else {}),
    }


def test_one_percent_of_every_kind_is_exactly_the_dead_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, poison = poisoned_source(tmp_path, rows := 2500 if SOAK else 1000, list(KINDS))
    faults = [{"kind": kind, "match": {"contains": f"<<{kind}>>"}} for kind in KINDS]
    arguments = ["--speed", "10", "--faults", json.dumps(faults)]
    with platform(tmp_path, monkeypatch, spec(source, SCHEMA), simulator=arguments) as site:
        fleet = {"name": "simulator", "kind": "endpoint", "url": site.simulator.url, "max_num_seqs": 256}
        (site.home / "fleet.yaml").write_text(json.dumps({"engines": [fleet | {"timeout": 20}]}))
        site.launch_job("poisoned_refresh")
        published(site, 400)
        table = {line["row_id"]: line for line in site.published_rows()}
        asked = sum(site.simulator.received().values())
    assert len(table) == rows
    dead = {row: line["error"] for row, line in table.items() if line["error"] is not None}
    print(f"\n{len(poison)} poisoned of {rows}; dead letters by code {Counter(dead.values())}; {asked} requests")
    assert set(dead) == set(poison)
    assert {row: KINDS[kind] for row, kind in poison.items()} == dead
    good = [line for row, line in table.items() if row not in poison]
    assert all(json.loads(line["output"]).keys() == {"answer", "why"} for line in good)


def engine_deaths(log: Path) -> Counter[str]:
    """How often an engine died of each prompt, by the log of all engines.

    A scripted crash writes the log first and ends the process with the request that meets it: of such a prompt the log
    has no end, and every time that it was received is one death.
    """
    events = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    ended = {event["prompt"] for event in events if event["event"] == "finished"}
    received = Counter(event["prompt"] for event in events if event["event"] == "received")
    return Counter({prompt: times for prompt, times in received.items() if prompt not in ended})


def test_rows_that_kill_engines_are_found_and_cost_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, poison = poisoned_source(tmp_path, rows := 1000 if SOAK else 200, ["crash"])
    log = tmp_path / "engines.jsonl"
    engine = {
        "name": "embedded",
        "kind": "simulated",
        "max_num_seqs": 128,
        "speed": 20,
        "arguments": [
            "--request-log", str(log), "--faults", json.dumps([{"kind": "crash", "match": {"contains": "<<crash>>"}}]),
        ],
    }  # fmt: skip
    with platform(
        tmp_path, monkeypatch, spec(source, None), simulator=["--speed", "20"], fleet={"engines": [engine]}
    ) as site:
        site.launch_job("poisoned_refresh")
        published(site, 800)
        table = {line["row_id"]: line for line in site.published_rows()}
        eventually(lambda: len(engine_deaths(log)) == len(poison), 20, "the last lines of the engines' log")
        crashes = engine_deaths(log).total()
    dead = {row: line["error"] for row, line in table.items() if line["error"] is not None}
    print(f"\n{len(poison)} rows of {rows} kill engines: {crashes} engines died", file=sys.stderr)
    assert set(dead) == set(poison)
    assert set(dead.values()) == {"engine_killed"}
    assert {line["tries"] for row, line in table.items() if row not in poison} == {1}
    assert crashes <= 9 * len(poison) + (0 if SOAK else 8)  # a search may be long, and two rows are no mean
