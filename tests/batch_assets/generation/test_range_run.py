"""A range of batches against a real simulated engine and a real store, without Dagster."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from aiohttp import web
from support.http_server import ANSWER, http_server, models
from support.range_runs import a_run, generate
from support.simulated_engine import simulated_engine
from support.snapshots import MODEL, commit, current_path, overwrite, questions, write_snapshot
from support.specs import spec

from batch_assets.catalog import ledger
from batch_assets.catalog.ledger import LedgerVersion
from batch_assets.generation.range_run import Intent, RangeRun, RunIdentity, plan_range
from gpu_runner.client.protocol import EngineRefused
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore, SnapshotManifest


@pytest.mark.slow
def test_a_range_is_generated_committed_and_then_only_reported(any_objects: Objects) -> None:
    store = DatasetStore(any_objects, "d")
    manifest = write_snapshot(store, questions(95))
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        run = a_run(store, manifest, "run-1")
        asyncio.run(generate(run, engine.url))
        run.close()
    assert run.missing() == []
    assert not list(any_objects.list("d/journal/"))
    again = plan_range(store, store.entries(manifest.snapshot), Intent("run-2"))
    assert (len(again.done), again.todo) == (10, [])
    assert {footer.epoch for footer in again.done} == {7}
    assert {footer.model for footer in again.done} == {f"{MODEL} (simulated)"}


def test_a_footer_tells_rows_that_were_asked_from_rows_that_were_there(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "d")
    commit(store, write_snapshot(store, questions(10)))
    manifest = write_snapshot(store, questions(8) + questions(2, start=100))
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        run = a_run(store, manifest, "run-1")
        asyncio.run(generate(run, engine.url))
        run.close()
    (entry,) = store.entries(manifest.snapshot)
    footer = store.footer(store.current_objects([entry])[entry.key])
    assert (footer.rows, footer.reused, run.progress().ok) == (10, 8, 2)
    assert ledger.batch_event(store, footer, manifest.snapshot).metadata["reused"].value == 8


@pytest.mark.slow
@pytest.mark.parametrize("batch_rows", [50, 250])
def test_an_engine_that_refuses_every_row_fails_the_run_and_buries_none(
    local_objects: Objects, batch_rows: int
) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(600), batch_rows=batch_rows)
    # vLLM's answer to a temperature that cannot be: 400 for whatever row.
    with simulated_engine("--speed", "200", model="another") as engine, pytest.raises(EngineRefused, match="another"):
        asyncio.run(generate(a_run(store, manifest, "run-1"), engine.url))
    faults = json.dumps([{"kind": "http_500", "match": {"contains": "never"}}])
    with simulated_engine("--speed", "200", "--faults", faults, model=MODEL) as engine:
        broken = manifest.model_copy(update={"generation": manifest.generation | {"sampling": {"temperature": -1}}})
        run = a_run(store, broken, "run-2")
        with pytest.raises(EngineRefused, match=r"refused with status 400.*The server says: .*temperature"):
            asyncio.run(generate(run, engine.url))
        run.close()
    assert not list(local_objects.list("d/journal/"))
    assert not list(local_objects.list("d/batches/"))


def test_a_small_range_whose_rows_are_all_refused_is_dead_letters(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(30), batch_rows=5)
    refusal = json.dumps([{"kind": "too_long", "match": {"contains": "What is"}}])
    with simulated_engine("--speed", "200", "--faults", refusal, model=MODEL) as engine:
        run = a_run(store, manifest, "run-1")
        asyncio.run(generate(run, engine.url))
        run.close()
    assert run.missing() == []
    assert run.progress().dead == 30


@pytest.mark.parametrize(
    "sampling", [{"extra": {"max_completion_tokens": 50}}, {"max_tokens": None}], ids=["its own name", "none"]
)
def test_a_server_that_refuses_max_tokens_answers_every_row(
    local_objects: Objects, sampling: dict[str, object]
) -> None:
    """As OpenAI's reasoning models do: unsupported_parameter for max_tokens, whatever stands beside it."""
    bodies: list[dict[str, object]] = []

    async def chat(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        if "max_tokens" not in bodies[-1]:
            return web.json_response(ANSWER)
        said = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'."
        error = {"message": said, "type": "invalid_request_error", "code": "unsupported_parameter"}
        return web.json_response({"error": error}, status=400)

    store = DatasetStore(local_objects, "d")
    generation = spec(model=MODEL, sampling=sampling).generation()
    manifest = write_snapshot(store, questions(20))
    manifest = manifest.model_copy(update={"generation": asdict(generation)})

    async def main() -> RangeRun:
        async with http_server({"/v1/models": models({"id": MODEL}), "/v1/chat/completions": chat}) as url:
            run = a_run(store, manifest, "run-1")
            await generate(run, url)
            return run

    run = asyncio.run(main())
    assert (run.progress().ok, run.progress().dead, len(bodies)) == (20, 0, 20)


def test_a_redrive_keeps_completions_and_writes_the_next_generation(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(40))
    poison = json.dumps([{"kind": "too_long", "match": {"contains": "What is 7 plus 7?"}}])
    with simulated_engine("--speed", "200", "--faults", poison, model=MODEL) as engine:
        first = a_run(store, manifest, "run-1")
        asyncio.run(generate(first, engine.url))
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        redrive = a_run(store, manifest, "run-2", Intent("run-2", redrive=True))
        asyncio.run(generate(redrive, engine.url))
    assert redrive.progress().ok == 1
    assert redrive.progress().known == 9
    objects = store.objects_by_batch()["00000"]
    assert [batch.generation for batch in objects] == [0, 1]
    assert [o.output for o in store.outcomes(objects[0])][8:] == [o.output for o in store.outcomes(objects[1])][8:]
    # A retry of the re-drive finds its own work done.
    retry = plan_range(store, store.entries(manifest.snapshot), Intent("run-2", redrive=True))
    assert [footer.generation for footer in retry.done][:2] == [1, 0]


def test_a_redrive_of_one_error_keeps_the_other_dead_letters(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(20), batch_rows=20)
    poison = json.dumps([{"kind": "too_long", "match": {"contains": "What is 7 plus 7?"}}])
    with simulated_engine("--speed", "200", "--faults", poison, model=MODEL) as engine:
        asyncio.run(generate(a_run(store, manifest, "run-1"), engine.url))
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        other = a_run(store, manifest, "run-2", Intent("run-2", redrive=True, redrive_error="rejected_402"))
        asyncio.run(generate(other, engine.url))
        assert (other.progress().known, other.progress().requests) == (20, 0)
        same = a_run(store, manifest, "run-3", Intent("run-3", redrive=True, redrive_error="context_length_exceeded"))
        asyncio.run(generate(same, engine.url))
    assert (same.progress().ok, same.progress().known) == (1, 19)


@pytest.mark.parametrize("damage", [lambda data: data[:-10], lambda data: data[:300] + b"?" + data[301:]])
def test_a_damaged_object_is_replaced_by_the_next_generation(
    local_objects: Objects, damage: Callable[[bytes], bytes]
) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(20))
    with simulated_engine("--speed", "200", model=MODEL) as engine:
        asyncio.run(generate(a_run(store, manifest, "run-1"), engine.url))
        torn = store.batch_path(store.objects_by_batch()["00001"][0])
        local_objects.put(torn, damage(local_objects.get(torn)))
        asyncio.run(generate(a_run(store, manifest, "run-2"), engine.url))
    assert [batch.generation for batch in store.objects_by_batch()["00001"]] == [0, 1]
    assert plan_range(store, store.entries(manifest.snapshot), Intent("x")).todo == []


@pytest.mark.parametrize("lost", ["void", "damaged", "gone"])
def test_a_regenerate_of_a_batch_that_is_lost_keeps_no_earlier_row_and_a_redrive_no_dead_one(
    local_objects: Objects, lost: str
) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(10))
    commit(store, manifest, dead=["id-000003"])
    commit(store, manifest, dead=["id-000003"], generation=1)
    entries = store.entries(manifest.snapshot)
    newest = current_path(store, manifest, "00000")
    version = LedgerVersion(entries[0].data_version, 1)
    version = version.voided() if lost == "void" else version
    if lost == "damaged":
        overwrite(store, newest, b"torn")
    if lost == "gone":
        local_objects.delete([newest])

    def kept(intent: Intent) -> list[str]:
        plan = plan_range(store, entries, intent, {"00000": version})
        identity = RunIdentity(intent.root_run_id, intent, ("00000", "00000"))
        with contextlib.closing(RangeRun(store, manifest, plan, identity)) as run:
            (work,) = plan.todo
            assert work.generation == 2
            return sorted(one.row_id for one in run.source.kept(work))

    every = [f"id-{i:06d}" for i in range(10)]
    assert kept(Intent("ordinary")) == every
    assert kept(Intent("again", regenerate=True)) == []
    assert kept(Intent("dead", redrive=True)) == [row for row in every if row != "id-000003"]


def test_a_regenerated_row_stays_when_the_rows_around_it_change(local_objects: Objects) -> None:
    """Of several earlier completions of a row the newest is copied, whatever the hashes of their data versions."""
    store = DatasetStore(local_objects, "d")
    for extra in range(6):  # six data versions of one batch: some sort before the regenerated one, some after
        manifest = write_snapshot(store, questions(4) + questions(1, start=100 + extra))
        answers = {"id-000000": f"answer of version {extra}"}
        commit(store, manifest, answer=lambda row, n, said=answers: said.get(row.row_id, f"answer {n}"))
        age_objects(store, manifest, extra)
        run = a_run(store, write_snapshot(store, questions(4)), "next")
        ((_, batch),) = [(work, list(run.source.kept(work))) for work in run._job.works.values()]
        kept = {outcome.row_id: outcome.output for outcome in batch}
        assert kept["id-000000"] == f"answer of version {extra}"


def age_objects(store: DatasetStore, manifest: SnapshotManifest, hours: int) -> None:
    """Make a snapshot's objects as if their rows had been generated `hours` later."""
    for entry, batch in zip(
        store.entries(manifest.snapshot), store.current_objects(store.entries(manifest.snapshot)).values(), strict=True
    ):
        footer = store.footer(batch)
        later = [replace(o, started_at=o.started_at + 3600 * hours) for o in store.outcomes(batch)]
        store.objects.delete([store.batch_path(batch)])
        assert store.commit(footer, later, "chat")[1] and entry.key == batch.key


@pytest.mark.parametrize(
    ("gaps", "found", "has_all"),
    [
        (False, ("00003", "00007"), True),
        (False, ("00000", "00020"), False),
        (True, ("00003", "00007"), False),  # another run's, in a gap of this one
        (True, ("00005", "00005"), False),
        (True, ("00000", "00000"), True),
        (True, ("00000", "00019"), False),  # of a run with other gaps, perhaps
    ],
)
def test_of_a_range_with_gaps_a_run_has_its_own_batches_only(gaps: bool, found: tuple[str, str], has_all: bool) -> None:
    identity = RunIdentity("run", Intent("run"), ("00000", "00019"), gaps)
    assert identity.has_all(*found, {"00000", "00019"}) is has_all
