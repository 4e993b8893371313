"""Conversations whose user is played by another model on an engine of its own."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from support import range_worker
from support.conversation_runs import answer, found, killed, questions, said, snapshot_of, table_of, write
from support.dataset_project import MODEL, dataset_project
from support.plain_engine import PlainEngine, plain_engine
from support.range_runs import a_run, leased
from support.simulated_engine import simulated_engine
from support.specs import spec
from support.timing import PATIENCE

import batch_assets.generation.op as op
import batch_assets.generation.user_engine as user_engine
import resources.fleet.client
from batch_assets.capacity_planning.planner_input import FleetView, propose
from batch_assets.capacity_planning.preview_rows import ask_rows, first_rows
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.cli.dataset_commands import preview
from batch_assets.component import spec_version
from batch_assets.generation.range_run import RangeRun
from batch_assets.generation.user_engine import UserEngineAway
from batch_assets.request_status.dataset_status import RunWait
from batch_assets.spec.errors import SpecError
from gpu_runner.client.engine_client import EngineRefused
from gpu_runner.cost_meter import TokenMeter
from gpu_runner.fleet_database.database import FleetDatabase, Lease, RunBeat
from gpu_runner.fleet_database.wait_reason import WaitKind
from gpu_runner.planner.types import ControlTiming
from gpu_runner.request_limits import RequestLimits
from gpu_runner.rows import Outcome
from gpu_runner.token_price import TokenPrice
from resources.fleet.fleet_config import EngineConfig
from resources.fleet.resource import LeasedEngine
from resources.objects.opening import Objects, open_objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest
from resources.store.journal import note_furthest

OTHER = "vendor/large"
USER = {"system": "You are {{ q }}.", "turns": 3, "opening": "Yes?", "sampling": {"max_tokens": 40}}
ELSEWHERE = {**USER, "model": OTHER, "engine": "api"}
PROMPT = {"system": "Be kind.", "user": "{{ q }}?", "user_model": ELSEWHERE}


def plays(request: dict[str, Any]) -> str:
    return f"u{sum(message['role'] == 'assistant' for message in request['messages']) + 1}"


@contextmanager
def two_engines() -> Iterator[tuple[PlainEngine, PlainEngine]]:
    """One that answers, and one that plays the user."""
    with plain_engine(MODEL) as answering, plain_engine(OTHER) as playing:
        answering.text, playing.text = answer, plays
        yield answering, playing


def on(answering: PlainEngine, playing_url: str, **user: Any) -> LeasedEngine:
    user_leased = LeasedEngine(playing_url, None, None, "vendor", "hosted", lease=Lease("api/d", 1, "run", "d"), **user)
    return replace(leased(answering.url), user=user_leased)


def run_of(store: DatasetStore, manifest: SnapshotManifest, run_id: str) -> RangeRun:
    return a_run(store, manifest, run_id, user_elsewhere=True)


def finish(store: DatasetStore, manifest: SnapshotManifest, engine: LeasedEngine, run_id: str = "run-1") -> None:
    run = run_of(store, manifest, run_id)

    async def main() -> None:
        async with asyncio.timeout(60):
            assert await run.prepare()
            await run.serve(engine)

    asyncio.run(main())
    run.close()


@pytest.fixture
def store(local_objects: Objects) -> DatasetStore:
    return DatasetStore(local_objects, "d")


def test_each_text_is_asked_of_its_own_engine_and_priced_there(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(6))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT, sampling={"temperature": 0, "max_tokens": 90})
    with two_engines() as (answering, playing):
        engine = on(answering, playing.url, spending=TokenMeter(TokenPrice(1000, 2000, None), 0.01))
        engine.spending = TokenMeter(TokenPrice(1, 1, None), 0.0001)
        finish(store, manifest, engine)
        assert engine.user is not None
        spent = engine.user.spending.spent()
    assert (len(answering.requests), len(playing.requests)) == (18, 12)
    assert {request["model"] for request in playing.requests} == {OTHER}
    assert {request["max_tokens"] for request in playing.requests} == {40}
    assert {request["model"] for request in answering.requests} == {MODEL}
    assert not any("Be kind." in said(request) for request in playing.requests)
    assert max(Counter(map(said, [*answering.requests, *playing.requests])).values()) == 1
    rows = table_of(store, manifest, tmp_path)
    assert [one["content"] for one in rows["prompt"][1]] == ["Be kind.", "q1?", "a1", "u2", "a2", "u3"]
    written = rows["user_turns"][1].to_list()
    of_user = (5 * 1000 + 3 * 2000) / 1e6
    assert [(one["model"], one["tries"], one["usd"]) for one in written] == [(OTHER, 1, pytest.approx(of_user))] * 2
    assert rows["usd"].to_list() == [pytest.approx(2 * of_user + 3 * 8 / 1e6)] * 6
    assert rows["tries"].to_list() == [5] * 6 and rows["provider"].to_list() == ["simulated"] * 6
    assert (spent.rows, spent.prompt_tokens, spent.useful_usd) == (0, 60, pytest.approx(12 * of_user))


def test_each_text_of_a_killed_run_is_asked_once(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(12))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT, batch_rows=6)
    with two_engines() as (answering, playing):
        run = run_of(store, manifest, "run-1")
        killed(run, answering, 20, lease=on(answering, playing.url))
        known: dict[tuple[str, str], Outcome] = {}
        for path in store.journal.segments(("00000", "99999")):
            for rows in store.journal.read(path).values():
                note_furthest(known, rows)
        kept = sum(one.texts - 1 for one in known.values())
        assert kept
        answering.requests.clear()
        playing.requests.clear()
        finish(store, manifest, on(answering, playing.url), "run-2")
    asked = [*answering.requests, *playing.requests]
    assert len(asked) == 60 - kept and max(Counter(map(said, asked)).values()) == 1
    whole = found(store, manifest).values()
    assert {(one.output, len(one.turns), one.tries, one.completion_tokens) for one in whole} == {("a3", 3, 5, 15)}


@pytest.mark.slow
@pytest.mark.soak("losses")
def test_kill_9_in_the_middle_repeats_only_texts_under_way(tmp_path: Path) -> None:
    root, database, rows = str(tmp_path / "store"), f"sqlite:///{tmp_path}/fleet.db", 150
    write(tmp_path, *questions(rows))
    disk = DatasetStore(open_objects(root), "d")
    manifest = snapshot_of(tmp_path, disk, prompt=PROMPT, batch_rows=25, sampling={"max_tokens": 60})
    with (
        simulated_engine("--speed", "2", model=MODEL) as answering,
        simulated_engine("--speed", "2", model=OTHER) as playing,
    ):

        def stats(name: str) -> list[int]:
            return [int(engine.get("/simulator/stats")[name]) for engine in (answering, playing)]

        under_way, kills = 0, 3
        for number in range(kills + 1):
            command = [
                sys.executable,
                range_worker.__file__,
                root,
                database,
                answering.url,
                f"run-{number}",
                playing.url,
            ]
            worker = subprocess.Popen(command)
            try:
                if number == kills:
                    assert worker.wait(PATIENCE * 90) == 0
                    continue
                wanted, deadline = stats("requests")[1] + 60, time.monotonic() + PATIENCE * 60
                while stats("requests")[1] < wanted:
                    assert worker.poll() is None and time.monotonic() < deadline
                    time.sleep(0.02)
                under_way += sum(stats("in_flight"))
            finally:
                worker.kill()
                worker.wait()
        answers, texts = stats("requests")
    whole = found(disk, manifest).values()
    assert len(whole) == rows and {(one.ok, len(one.turns), one.tries) for one in whole} == {(True, 3, 5)}
    assert {turn.user_model.model for one in whole for turn in one.turns[1:] if turn.user_model} == {
        f"{OTHER} (simulated)"
    }
    # Under way, and answered since the journal's last segment: of two engines with eight slots each.
    most = under_way + kills * 2 * range_worker.SLOTS * (1 + 8 * PATIENCE)
    print(f"{answers} answers for {3 * rows}, {texts} texts of the user for {2 * rows}, {under_way} under way at kills")
    assert 3 * rows <= answers and 2 * rows <= texts and answers + texts <= 5 * rows + most


@pytest.mark.slow
def test_the_bound_of_the_users_engine_is_its_own(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(20))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT)
    guard, now, most = threading.Lock(), Counter[str](), Counter[str]()

    def counted(name: str, text: Any) -> Any:
        def says(request: dict[str, Any]) -> str:
            with guard:
                now[name] += 1
                most[name] = max(most[name], now[name])
            threading.Event().wait(0.01)
            with guard:
                now[name] -= 1
            return text(request)

        return says

    with two_engines() as (answering, playing):
        answering.text, playing.text = counted("answers", answer), counted("user", plays)
        finish(store, manifest, on(answering, playing.url, limits=RequestLimits(concurrency=2)))
    assert most["user"] == 2 < most["answers"] and len(playing.requests) == 40


def test_a_text_that_the_users_engine_refuses_is_a_dead_letter_of_its_row_alone(
    tmp_path: Path, store: DatasetStore
) -> None:
    write(tmp_path, *questions(8))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT)
    with two_engines() as (answering, playing):
        playing.text = lambda request: None if "You are q2." in said(request) else plays(request)
        finish(store, manifest, on(answering, playing.url))
    outcomes = found(store, manifest)
    assert [one.row_id for one in outcomes.values() if not one.ok] == ["r2"]
    assert (outcomes["r2"].error, len(outcomes["r2"].turns)) == ("rejected_400", 1)
    assert not any("Be kind." in said(request) for request in playing.requests), "nor is it in what brings evidence"


def test_an_engine_that_is_away_burns_no_row_and_the_run_says_so(
    tmp_path: Path, store: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_engine, "AWAY_TRIES", 4)
    monkeypatch.setattr(user_engine, "FIRST_REST", 0.01)
    write(tmp_path, *questions(8))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT)
    with plain_engine(MODEL) as gone:
        away = gone.url
    with two_engines() as (answering, playing):
        run = run_of(store, manifest, "run-1")

        async def main() -> None:
            assert await run.prepare()
            with pytest.raises(UserEngineAway, match=r"engine api, found none in 4 tries in a row.*unreachable"):
                await run.serve(on(answering, away))
            await run.flush()

        asyncio.run(main())
        failing = run.failing(float("inf"))
        run.close()
        assert failing is not None and "to the model that plays the user" in failing.describe(0.0)
        assert len(answering.requests) == 8 and not found(store, manifest)
        finish(store, manifest, on(answering, playing.url), "run-2")
        assert (len(answering.requests), len(playing.requests)) == (24, 16), "the first answers were kept"
    assert all(one.ok and one.tries == 5 for one in found(store, manifest).values())


def test_an_engine_that_comes_back_goes_on(
    tmp_path: Path, store: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_engine, "FIRST_REST", 0.01)
    write(tmp_path, *questions(8))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT)
    tried: list[Any] = []
    original = user_engine.client_of

    def late(engine: LeasedEngine, *rest: Any, **more: Any) -> Any:
        tried.append(engine)
        there = engine if len(tried) > 2 else replace(engine, endpoint=away)
        return original(there, *rest, **more)

    monkeypatch.setattr(user_engine, "client_of", late)
    with plain_engine(MODEL) as gone:
        away = gone.url
    with two_engines() as (answering, playing):
        finish(store, manifest, on(answering, playing.url))
        assert (len(answering.requests), len(playing.requests), len(tried)) == (24, 16, 3)
    assert all(one.ok and one.tries == 5 for one in found(store, manifest).values())


def test_an_engine_that_serves_another_model_ends_the_run(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(2))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT)
    with two_engines() as (answering, _), pytest.raises(EngineRefused, match=r"prompt\.user_model, engine api.*large"):
        finish(store, manifest, on(answering, answering.url))
    assert not found(store, manifest)


def test_answers_under_way_are_kept_when_the_users_engine_ends_the_run(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(2))
    manifest = snapshot_of(tmp_path, store, prompt=PROMPT)
    refused = threading.Event()
    with two_engines() as (answering, _), plain_engine("another") as other:
        slow = answering.text
        assert callable(slow)

        def answers(request: dict[str, Any]) -> str | None:
            refused.wait(20 * PATIENCE)
            return slow(request)

        answering.text = answers
        run = run_of(store, manifest, "run-1")

        async def main() -> None:
            assert await run.prepare()
            serving = asyncio.create_task(run.serve(on(answering, other.url)))
            while len(answering.requests) < 2:  # noqa: ASYNC110 - the engine is another thread
                await asyncio.sleep(0.01)
            done, _ = await asyncio.wait([serving], timeout=0.5)
            assert not done, "the answers are waited for"
            refused.set()
            with pytest.raises(EngineRefused, match="large"):
                await serving
            await run.flush()

        asyncio.run(main())
        run.close()
        answering.text = slow
        with plain_engine(OTHER) as playing:
            playing.text = plays
            finish(store, manifest, on(answering, playing.url), "run-2")
        assert len(answering.requests) == 6, "each answer was asked once"


@pytest.mark.slow
def test_a_run_finds_the_engine_in_fleet_yaml_and_its_cost_is_on_the_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VENDOR_KEY", "secret-key")
    with (
        two_engines() as (answering, playing),
        dataset_project(tmp_path, prompt=PROMPT, source={"path": "q.jsonl"}) as site,
    ):
        (tmp_path / "fleet.yaml").write_text(
            f"engines: [{{name: own, kind: endpoint, url: '{answering.url}', models: [{MODEL}]}}, "
            f"{{name: api, kind: endpoint, url: '{playing.url}', models: [{OTHER}], api_key_env: VENDOR_KEY, "
            "usd_per_million_tokens: {input: 1000, output: 2000}, concurrency: 3}]\n"
        )
        write(tmp_path, *questions(8))
        assert site.materialize("prompts").success and site.run_rows("00000", "00000", None).success
        assert (len(answering.requests), len(playing.requests)) == (24, 16)
        (cost,) = site.fleet_db.costs()
        spent = 16 * (5 * 1000 + 3 * 2000) / 1e6
        assert site.fleet_db.spend("d").usd == cost.usd.useful == pytest.approx(spent) and cost.rows == 0
        assert site.fleet_db.leases_of("d") == 0


def fleet_of(folder: Path, answering: PlainEngine, playing_url: str, price: str = "") -> None:
    (folder / "fleet.yaml").write_text(
        f"engines: [{{name: own, kind: endpoint, url: '{answering.url}', {price}models: [{MODEL}]}}, "
        f"{{name: api, kind: endpoint, url: '{playing_url}', models: [{OTHER}], concurrency: 3, "
        "usd_per_million_tokens: {input: 1000, output: 2000}}]\n"
    )


@pytest.mark.slow
def test_the_budget_bounds_what_the_user_costs_and_it_goes_on_when_that_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources.fleet.client, "BUDGET_WAITS", 1)
    with (
        two_engines() as (answering, playing),
        dataset_project(tmp_path, prompt=PROMPT, source={"path": "q.jsonl"}) as site,
    ):
        fleet_of(tmp_path, answering, playing.url)
        write(tmp_path, *questions(120))
        assert site.materialize("prompts").success
        site.fleet_db.begin_request("d", "r", budget_usd=1.5)
        done: list[bool] = []
        run = threading.Thread(target=lambda: done.append(site.run_rows("00000", "00011", None).success))
        run.start()
        deadline = time.monotonic() + 20 * PATIENCE
        while [one.wait.kind for one in site.fleet_db.runs() if one.wait is not None] != [WaitKind.BUDGET]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        spent, asked = site.fleet_db.spend("d").usd, len(playing.requests)
        assert 0 < spent <= 1.5
        time.sleep(0.5)
        assert len(playing.requests) == asked, "it waits for money"
        site.fleet_db.override("d", budget_usd=1000.0)
        run.join()
        assert done == [True] and len(playing.requests) == 240 and len(answering.requests) == 360
        assert site.fleet_db.spend("d").usd == pytest.approx(240 * 0.011)


@pytest.mark.parametrize("price", ["usd_per_million_tokens: 100, ", ""])
def test_what_a_plan_says_of_two_prices_is_what_the_run_is_billed(tmp_path: Path, price: str) -> None:
    with (
        two_engines() as (answering, playing),
        dataset_project(tmp_path, prompt=PROMPT, source={"path": "q.jsonl"}) as site,
    ):
        fleet_of(tmp_path, answering, playing.url, price)
        write(tmp_path, *questions(20))
        assert site.materialize("prompts").success and site.run_rows("00000", "00000", None).success
        before, (made, folder) = site.fleet_db.spend("d").usd, site.specs["d"]
        work = WorkloadEstimator(made, site.store, folder).look()
        assert work.rows == 10
        found = propose(FleetView.look(site.fleet, site.fleet_db), site.fleet_db, made, work, {}, ControlTiming())
        assert site.run_rows("00001", "00001", None).success
        billed = site.fleet_db.spend("d").usd - before
    of_user, of_answers = 20 * (5 * 1000 + 3 * 2000) / 1e6, 30 * 8 * 100 / 1e6
    assert billed == pytest.approx(of_user + (of_answers if price else 0.0))
    assert found.plan.chosen is not None and found.plan.chosen.usd.p50 == pytest.approx(billed, rel=0.02)


@pytest.mark.slow
def test_a_run_whose_user_is_away_fails_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_engine, "AWAY_TRIES", 3)
    monkeypatch.setattr(user_engine, "FIRST_REST", 0.01)
    with plain_engine(OTHER) as gone:
        away = gone.url
    with plain_engine(MODEL) as answering, dataset_project(tmp_path, prompt=PROMPT, source={"path": "q.jsonl"}) as site:
        answering.text = answer
        fleet_of(tmp_path, answering, away)
        write(tmp_path, *questions(4))
        assert site.materialize("prompts").success and not site.run_rows("00000", "00000", None).success
        assert "prompt.user_model: expected an answer of engine api, found none in 3 tries in a row" in site.reason()
        assert site.fleet_db.holder("own") is None and not found(site.store, site.manifest())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{name: other, kind: endpoint, url: 'http://h:1', models: [x]}", "expected an engine of kind endpoint"),
        ("{name: api, kind: simulated}", "found api, of kind simulated"),
        ("{name: api, kind: endpoint, url: 'http://h:1'}", "Write `models: [vendor/large]` there"),
        ("{name: api, kind: endpoint, url: 'http://h:1', models: [x]}", "found api with x"),
    ],
)
def test_an_entry_that_cannot_play_the_user_is_refused(tmp_path: Path, entry: str, words: str) -> None:
    from resources.fleet.fleet_config import FleetConfig, FleetConfigError

    file = tmp_path / "fleet.yaml"
    file.write_text(f"engines: [{entry}]\n")
    with pytest.raises(FleetConfigError, match=re.escape(words)):
        FleetConfig.load(file).user_engine("api", OTHER)


def test_a_preview_asks_both(tmp_path: Path) -> None:
    write(tmp_path, *questions(1))
    made = spec(prompt=PROMPT, model=MODEL, id="id")
    with two_engines() as (answering, playing):
        user = EngineConfig(name="api", kind="endpoint", url=playing.url, models=[OTHER])
        (row,), _ = ask_rows(first_rows(made, tmp_path, 1), made.generation(), answering.url, None, None, user)
        assert (len(answering.requests), len(playing.requests)) == (3, 2)
    assert [one["content"] for one in row.decoded()] == ["Be kind.", "q0?", "a1", "u2", "a2", "u3"]


def test_a_preview_holds_to_the_bounds_of_each_engine(tmp_path: Path) -> None:
    write(tmp_path, *questions(6))
    made = spec(prompt=PROMPT, model=MODEL, id="id")
    rows, given = first_rows(made, tmp_path, 6), {"name": "api", "kind": "endpoint", "models": [OTHER]}
    with two_engines() as (answering, playing):
        most = {"answers": most_at_once(answering), "user": most_at_once(playing)}
        user = EngineConfig(url=playing.url, concurrency=2, **given)
        ask_rows(rows, made.generation(), answering.url, None, None, user, RequestLimits(concurrency=3))
        assert [len(now) for now in most.values()] == [3, 2]
        user = EngineConfig(url=playing.url, requests_per_minute=1200, **given)
        _, seconds = ask_rows(rows, made.generation(), answering.url, None, None, user)
        assert seconds >= 0.4, "twelve texts at twenty a second, of which five may go at once"
        playing.text = lambda _: threading.Event().wait(1.5) or "late"
        user = EngineConfig(url=playing.url, timeout=0.5, **given)
        (row, *_), seconds = ask_rows(rows, made.generation(), answering.url, None, None, user)
        assert row.answer is not None and row.answer.completion is None and "time" in row.answer.problem


def test_a_preview_names_the_users_engine_where_that_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *questions(1))
    made = spec(prompt=PROMPT, model=MODEL, id="id")
    with two_engines() as (answering, _):
        user = EngineConfig(name="api", kind="endpoint", url=answering.url, models=[OTHER])
        with pytest.raises(EngineRefused, match=r"prompt\.user_model, engine api: .*vendor/large"):
            ask_rows(first_rows(made, tmp_path, 1), made.generation(), answering.url, None, None, user)
        (tmp_path / "fleet.yaml").write_text("engines: [{name: other, kind: simulated}]\n")
        monkeypatch.setenv("BATCH_ASSETS_FLEET", str(tmp_path / "fleet.yaml"))
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
        asked = len(answering.requests)
        with pytest.raises(preview.PreviewError, match=r"d: prompt\.user_model\.engine: expected an engine of kind"):
            preview.preview(made, tmp_path, 1, preview.Engine(answering.url, None))
        assert len(answering.requests) == asked


def most_at_once(engine: PlainEngine) -> set[int]:
    """Filled with the numbers of requests that were under way at once."""
    says, guard, now, seen = engine.text, threading.Lock(), [0], set[int]()
    assert callable(says)

    def text(request: dict[str, Any]) -> Any:
        with guard:
            now[0] += 1
            seen.add(now[0])
        threading.Event().wait(0.02)
        with guard:
            now[0] -= 1
        return says(request)

    engine.text = text
    return seen


def test_the_model_is_part_of_a_rows_key_and_the_engines_name_is_not(tmp_path: Path, store: DatasetStore) -> None:
    write(tmp_path, *questions(1))
    keys, versions = [], []
    for change in ({}, {"engine": "api2"}, {"model": "vendor/small"}):
        prompt = {**PROMPT, "user_model": {**ELSEWHERE, **change}}
        manifest = snapshot_of(tmp_path, store, prompt=prompt)
        ((_, (row,)),) = store.rows(manifest, store.entries(manifest.snapshot))
        keys.append((row.row_key, manifest.snapshot))
        versions.append(spec_version(spec(prompt=prompt)))
    assert keys[0] == keys[1] != keys[2] and versions[0] == versions[1] != versions[2]
    on_its_own, elsewhere = (
        spec(prompt={**PROMPT, "user_model": user}, model=MODEL).generation()
        for user in (USER, {**USER, "model": MODEL, "engine": "api"})
    )
    assert on_its_own == elsewhere, "the same model writes the same, wherever it is asked"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, "prompt.user_model.engine: expected user_model.model beside it"),
        ({"engine": "http://a"}, "prompt.user_model.engine"),
        ({"engine": 3}, "prompt.user_model.engine"),
        ({"api_key": "x"}, "prompt.user_model.api_key"),
    ],
)
def test_what_names_no_engine_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        spec(prompt={**PROMPT, "user_model": {**ELSEWHERE, **change}})


def test_a_run_that_waits_for_the_lease_of_the_users_engine_says_so(tmp_path: Path) -> None:
    seen: list[RunBeat] = []

    def watch(fleet_db: FleetDatabase, taken: Lease) -> None:
        deadline = time.monotonic() + 20 * PATIENCE
        while not seen and time.monotonic() < deadline:
            seen.extend(one for one in fleet_db.runs() if one.wait is not None and one.wait.seconds > 0.5)
            time.sleep(0.02)
        assert fleet_db.release(taken)

    with (
        two_engines() as (answering, playing),
        dataset_project(tmp_path, prompt=PROMPT, source={"path": "q.jsonl"}) as site,
    ):
        fleet_of(tmp_path, answering, playing.url)
        write(tmp_path, *questions(4))
        assert site.materialize("prompts").success
        site.fleet_db.begin_run("another", "e", "00001", "00001")
        taken = site.fleet_db.try_lease("api/d", "another", "e", 600.0)
        assert taken is not None
        watching = threading.Thread(target=watch, args=(site.fleet_db, taken))
        watching.start()
        assert site.run_rows("00000", "00000", None).success
        watching.join()
        assert len(playing.requests) == 8
    (beat,) = seen
    assert beat.wait is not None and beat.wait.kind is WaitKind.ENGINES_HELD
    assert beat.note == "waiting: prompt.user_model: api is being leased by run another"
    assert RunWait.of(beat.wait, 100.0).since < 100.0, "as `status` says it"


@pytest.mark.parametrize(
    ("snapshot", "now", "words"),
    [
        (USER, ELSEWHERE, f"expected {MODEL}, which plays the user of this snapshot, found {OTHER} on engine api"),
        ({**ELSEWHERE, "model": "x"}, ELSEWHERE, f"expected x, which plays the user of this snapshot, found {OTHER}"),
        (ELSEWHERE, USER, f"expected {OTHER}, which plays the user of this snapshot, found no engine of fleet.yaml"),
        (ELSEWHERE, None, f"expected {OTHER}, which plays the user of this snapshot, found no engine of fleet.yaml"),
    ],
)
def test_a_run_of_an_older_snapshot_asks_no_other_engine_for_its_user(
    tmp_path: Path, store: DatasetStore, snapshot: dict[str, Any], now: dict[str, Any] | None, words: str
) -> None:
    write(tmp_path, *questions(1))
    settings = snapshot_of(tmp_path, store, prompt={**PROMPT, "user_model": snapshot}).settings()
    with pytest.raises(dg.Failure, match=re.escape(words)):
        op._user_engine(spec(prompt={**PROMPT, "user_model": now}, model=MODEL), settings)


@pytest.mark.parametrize(
    ("snapshot", "now", "engine"),
    [
        (USER, None, None),
        (USER, USER, None),
        (USER, {**ELSEWHERE, "model": MODEL}, "api"),
        ({**ELSEWHERE, "model": MODEL}, USER, None),
        ({**ELSEWHERE, "engine": "before"}, ELSEWHERE, "api"),
    ],
)
def test_the_same_model_of_an_older_snapshot_may_be_asked_elsewhere(
    tmp_path: Path, store: DatasetStore, snapshot: dict[str, Any], now: dict[str, Any] | None, engine: str | None
) -> None:
    write(tmp_path, *questions(1))
    settings = snapshot_of(tmp_path, store, prompt={**PROMPT, "user_model": snapshot}).settings()
    assert op._user_engine(spec(prompt={**PROMPT, "user_model": now}, model=MODEL), settings) == engine
