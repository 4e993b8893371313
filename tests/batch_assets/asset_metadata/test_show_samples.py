"""`show_samples: false`: nothing of a row is in any event, log or tag. With samples, the same search finds rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.dataset_project import MODEL, DatasetProject, dataset_project
from support.simulated_engine import SimulatedEngine, simulated_engine

from batch_assets.generation import range_run
from batch_assets.publishing.published_table import published_table
from gpu_runner.inference.failures.retry import RetryPolicy
from gpu_runner.inference.policy import FeedPolicy

WORDS = ["zanzibar", "quokka", "periwinkle"]  # of the question, of a kept column, of a bad row
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "100", model=MODEL) as engine:
        engine.set_faults(
            {"kind": "too_long", "match": {"contains": "number 3 "}},
            {"kind": "http_500", "match": {"contains": "number 4 "}},
            {"kind": "garbage", "match": {"contains": "number 5 "}},
            {"kind": "wrong_json", "match": {"contains": "number 6 "}},
        )
        yield engine


def generate(site: DatasetProject, engine: SimulatedEngine) -> list[dict[str, Any]]:
    """Everything that a dataset can go through; returns the lines of its table."""
    lines = [
        json.dumps({"id": f"id-{i}", "question": f"What of the {WORDS[0]}, number {i} of them?", "pet": WORDS[1]})
        for i in range(30)
    ]
    bad = json.dumps({"id": "bad", "question": None, "pet": WORDS[2]})
    (site.folder / "questions.jsonl").write_text("\n".join([*lines, bad, f"{{{WORDS[2]}"]) + "\n")
    assert site.materialize("prompts").success
    assert site.run_rows("00000", "00002", engine.url).success
    for name in ("dataset", "dead_letters"):
        assert site.materialize(name).success
    table = published_table(site.store)
    assert table is not None
    return pl.read_parquet(table.glob(site.store.objects)).to_dicts()


def kept_texts(site: DatasetProject, home: Path) -> bytes:
    """Every file of Dagster's home and of the fleet, and every event and tag as text."""
    files = [file for folder in (home, site.folder) for file in folder.rglob("*") if file.is_file()]
    store = site.folder / "store"
    own = [file for file in files if not file.is_relative_to(store) and file.name != "questions.jsonl"]
    texts = [file.read_bytes() for file in dict.fromkeys(own)]
    for run in site.instance.get_runs():
        texts += [json.dumps(dict(run.tags)).encode(), json.dumps(run.run_config, default=str).encode()]
        texts += [
            f"{entry.user_message} {entry.dagster_event}".encode() for entry in site.instance.all_logs(run.run_id)
        ]
    return b"\n".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize(("show", "schema"), [(False, None), (False, SCHEMA), (True, SCHEMA)])
def test_rows_are_in_no_event_log_or_tag_unless_they_may_be(
    tmp_path: Path,
    engine: SimulatedEngine,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    show: bool,
    schema: dict[str, Any] | None,
) -> None:
    retry = RetryPolicy(backoff_min=0.1, backoff_max=0.2, proof_lag=0.1, proof_health=0.5)
    soon = FeedPolicy(retry, poll_seconds=0.2)
    monkeypatch.setattr(range_run, "FeedPolicy", lambda **_: soon)
    home, folder = tmp_path / "home", tmp_path / "site"
    home.mkdir(), folder.mkdir()
    more: dict[str, Any] = {"output": {"json_schema": schema, "repair_tries": 0}} if schema else {}
    with dataset_project(folder, home, show_samples=show, keep_columns=["pet"], on_bad_row="skip", **more) as site:
        lines = generate(site, engine)
        kept = kept_texts(site, home) + caplog.text.encode() + "".join(capfd.readouterr()).encode()
    assert len(lines) == 30
    dead = {line["error"] for line in lines if line["error"]}
    assert len(dead) >= 3
    assert kept.count(b"dagster") > 100  # what is searched is there
    outputs = [line["output"][:24].encode() for line in lines if line["output"]]
    messages = [line["error_message"][:40].encode() for line in lines if line["error_message"]]
    assert outputs and messages
    found = {text for text in [*outputs, *(word.encode() for word in WORDS)] if text in kept}
    if show:
        assert b"zanzibar" in found
    else:
        assert found == set()
        card = next(folder.rglob("published/*/README.md")).read_text()
        assert not any(word in card for word in WORDS)
