"""`judge:` by the commands that a user types: with the engine simulator, and with a small real model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.llama_cpp import llama_cpp_server
from support.real_models import smollm2

import batch_assets
from e2e.command_line import SPEC, CommandProject
from e2e.command_line import site as new_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ANSWERS = {
    **{key: SPEC[key] for key in ("sampling", "model", "batch_rows", "batches_per_run")},
    "name": "answers",
    "source": {"grid": {"topic": ["tides", "bread", "chess", "rain"], "tone": ["short", "long"]}},
    "prompt": {"user": "A {{ tone }} sentence about {{ topic }}."},
    "samples": 2,
    "keep_columns": ["topic", "tone"],
}
SCORES = {
    **{key: SPEC[key] for key in ("model", "batch_rows", "batches_per_run")},
    "name": "scores",
    "judge": {"dataset": "answers", "rubric": "True, and one sentence.", "votes": 3, "accept": "score >= 3"},
    "sampling": {"temperature": 0.7, "max_tokens": 300},
    "keep_columns": ["topic"],
}
DUELS = {
    **{key: SCORES[key] for key in ("model", "batch_rows", "batches_per_run")},
    "name": "duels",
    "judge": {"dataset": "answers", "rubric": "True, and one sentence.", "compare": "pairwise", "group_by": "topic"},
    "sampling": {"temperature": 0, "max_tokens": 300},
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CommandProject]:
    with new_site(tmp_path) as found:
        yield found


def declare(site: CommandProject, *datasets: Mapping[str, Any], **more: Any) -> None:
    for one in datasets:
        site.declare({**one, **more})


def done(site: CommandProject, *words: str) -> Any:
    status, output = site.ask(*words)
    assert status == 0, site.commands[-1].said()
    return json.loads(output) if "--json" in words else output


def rows(site: CommandProject, name: str, **part: bool) -> list[dict[str, Any]]:
    return batch_assets.table(name, store=site.environment["BATCH_ASSETS_STORE"], **part).arrow().to_pylist()


def check_counts(site: CommandProject) -> None:
    """What `NAME/judged` says is what one counts in the votes."""
    votes, judged = rows(site, "scores"), rows(site, "scores", judged=True)
    said: dict[str, list[int]] = {}
    for vote in votes:
        said.setdefault(vote["judged_id"], []).extend([] if vote["score"] is None else [vote["score"]])
    assert [row["row_id"] for row in judged] == list(said) and len(votes) == 3 * len(judged)
    for row in judged:
        scores = said[row["row_id"]]
        assert (row["votes"], row["lost"]) == (3, 3 - len(scores))
        assert row["score"] == (pytest.approx(sum(scores) / len(scores)) if scores else None)
        most = Counter(scores).most_common(1)[0][1] if scores else 0
        assert row["agreement"] == (pytest.approx(most / len(scores)) if len(scores) > 1 else None)
    answers = {row["row_id"]: (row["output"], row["prompt"]) for row in rows(site, "answers") if row["error"] is None}
    assert {row["row_id"]: (row["output"], row["prompt"]) for row in judged} == answers
    passed = [row["row_id"] for row in rows(site, "scores", passed=True)]
    assert passed == [row["row_id"] for row in judged if row["score"] is not None and row["score"] >= 3]


@pytest.mark.soak("dagster")
def test_a_chain_with_a_judge_from_plan_to_training_files(site: CommandProject) -> None:
    declare(site, ANSWERS, SCORES, DUELS)
    plan = done(site, "plan", "scores", "--upstream")
    assert "answers" in plan and "scores" in plan
    done(site, "run", "scores", "--upstream", "--json")
    done(site, "run", "duels", "--json")
    check_counts(site)
    status = done(site, "status", "scores", "--json")
    found = status[0] if isinstance(status, list) else status
    assert (found["rows_judged"], found["votes"], found["votes_lost"]) == (16, 48, 0)
    assert found["judge_figures"]["score"] == pytest.approx(
        sum(r["score"] for r in rows(site, "scores", judged=True)) / 16
    )
    assert "scores: 16 rows judged, mean score " in done(site, "status", "scores")

    duels = rows(site, "duels", judged=True)
    assert len(duels) == 16 and {row["pairs"] for row in duels} == {3}
    assert sum(row["wins"] for row in duels) == sum(row["losses"] for row in duels)

    to = str(site.folder / "pairs")
    ranked = ("--group-by", "topic", "--rank-by", "score")
    done(site, "export", "scores", "--judged", "--format", "preference", "--to", to, *ranked)
    lines = [json.loads(line) for file in Path(to).glob("*.jsonl") for line in file.read_text().splitlines()]
    by_topic: dict[str, set[float]] = {}
    for row in rows(site, "scores", judged=True):
        by_topic.setdefault(row["topic"], set()).add(row["score"])
    assert len(lines) == sum(len(scores) > 1 for scores in by_topic.values()), (
        "a pair of each topic with a better answer"
    )

    # Another condition asks no row, and makes the rows that pass anew.
    judge = {**SCORES["judge"], "accept": "score >= 4"}  # type: ignore[dict-item]
    declare(site, {**SCORES, "judge": judge})
    before = rows(site, "scores")
    done(site, "run", "scores", "--json")
    assert rows(site, "scores") == before
    assert {row["score"] >= 4 for row in rows(site, "scores", passed=True)} <= {True}


@pytest.mark.soak("dagster")
def test_a_small_real_model_judges_what_it_wrote(tmp_path: Path) -> None:
    model = "SmolLM2-135M-Instruct"
    with llama_cpp_server(smollm2(), model, "--context", "2048") as engine, new_site(tmp_path) as site:
        url = f"http://127.0.0.1:{engine.port}"
        entry = {"name": "cpu", "kind": "endpoint", "url": url, "max_num_seqs": 8}
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"engines": [entry]}))
        fewer = {"source": {"grid": {"topic": ["tides", "bread"], "tone": ["short"]}}}
        declare(site, ANSWERS | fewer, SCORES, model=model)
        done(site, "run", "scores", "--upstream", "--json")
        check_counts(site)
        reasons = [row["reason"] for row in rows(site, "scores") if row["error"] is None]
        assert reasons and all(isinstance(reason, str) for reason in reasons)
