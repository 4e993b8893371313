"""A range whose rows go out as batches of a provider: the same objects, and no row is paid twice."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.fake_batch_api import FakeBatchApi, completion, fake_batch_api, line
from support.range_runs import a_run, journaled
from support.snapshots import MODEL, questions, write_snapshot

from batch_assets.generation.range_run import RangeRun
from gpu_runner.batch_api.submitted_batches import SubmittedBatch
from gpu_runner.cost_meter import TokenMeter
from gpu_runner.fleet_database.database import Lease
from gpu_runner.inference.failures.retry import RetryPolicy
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.request_limits import BatchLimits, RequestLimits
from gpu_runner.token_price import TokenPrice
from resources.fleet.resource import LeasedEngine
from resources.objects.opening import Objects
from resources.store.dataset_store import DatasetStore
from resources.store.stored_batches import RANGE, StoredBatches, range_of

LIMITS = BatchLimits(gather_seconds=0.1, poll_seconds=0.05)

POLICY = FeedPolicy(retry=RetryPolicy(backoff_min=0.02, backoff_max=0.05, proof_lag=0.05), poll_seconds=0.1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_runner.batch_api.batch_client.FIRST_POLL_SECONDS", 0.02)
    monkeypatch.setattr("gpu_runner.batch_api.patient_calls.FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr("gpu_runner.batch_api.patient_calls.LOOK_AFTER_SECONDS", (0.0,))


def leased(api: FakeBatchApi, limits: BatchLimits = LIMITS) -> LeasedEngine:
    meter = TokenMeter(TokenPrice(1.0, 2.0, 0.5), 0.0)
    lease = Lease("e", 7, "run", "d")
    return LeasedEngine(
        api.url, None, None, "batch", "batch", limits=RequestLimits(batches=limits), spending=meter, lease=lease
    )


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110  (neither the provider nor the store has an event)
            await asyncio.sleep(0.01)


def records(objects: Objects) -> list[str]:
    return [one.path for one in objects.list("d/submitted_batches/")]


def sent(objects: Objects) -> bool:
    """Whether a batch was created, and its id is written down."""
    return any(record.batch_id for record in StoredBatches(objects, "d").all())


def test_a_range_is_written_by_batches_and_costs_what_their_tokens_cost(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(95))
    tries: set[str] = set()

    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        """The second row is missing the first time, and the third is refused."""
        output = []
        for one in asked:
            text = one["body"]["messages"][-1]["content"]
            if "is 1 plus" in text and text not in tries:
                tries.add(text)
            elif "is 2 plus" in text:
                output.append(line(one, {"error": {"message": "moderation"}}, 400))
            else:
                output.append(line(one, completion("yes", 10, 4, prompt_tokens_details={"cached_tokens": 6})))
        return output[::-1], []

    async def work() -> tuple[RangeRun, LeasedEngine, FakeBatchApi]:
        async with fake_batch_api(MODEL, answer=answer) as api:
            run, engine = a_run(store, manifest, "run-1", policy=POLICY), leased(api)
            assert await run.prepare()
            async with asyncio.timeout(30):
                await run.serve(engine)
            run.close()
            return run, engine, api

    run, engine, api = asyncio.run(work())
    progress = run.progress()
    assert (run.missing(), progress.ok, progress.dead) == ([], 94, 1)
    assert len(api.batches) == 2 and len(api.asked) == 96
    usage = engine.spending.spent()
    assert usage.useful_usd == pytest.approx(94 * (4 * 1.0 + 6 * 0.5 + 4 * 2.0) / 1e6)
    metadata = next(iter(api.batches.values()))["metadata"]
    assert metadata["dataset"] == "d" and metadata["snapshot"] == manifest.snapshot
    assert not records(local_objects) and not list(local_objects.list("d/journal/"))


def test_the_run_after_a_killed_one_takes_its_batch_and_asks_for_nothing_twice(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(60))

    async def work() -> FakeBatchApi:
        async with fake_batch_api(MODEL, ends=False) as api:
            killed = a_run(store, manifest, "run-1", policy=POLICY)
            serving = asyncio.create_task(killed.serve(leased(api)))
            await until(lambda: sent(local_objects))
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            assert next(iter(api.batches.values()))["status"] == "in_progress", "the next run waits for it"
            api.ends = True
            run = a_run(store, manifest, "run-2", policy=POLICY)
            async with asyncio.timeout(30):
                await run.serve(leased(api))
            run.close()
            assert run.missing() == []
            return api

    api = asyncio.run(work())
    assert len(api.batches) == 1 and len(api.asked) == 60 and not records(local_objects)


def test_a_run_that_is_stopped_cancels_its_batch_and_keeps_what_it_finished(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(30))

    async def work() -> None:
        async with fake_batch_api(MODEL, ends=False, finished=7) as api:
            run, stop = a_run(store, manifest, "run-1", policy=POLICY), asyncio.Event()
            serving = asyncio.create_task(run.serve(leased(api), stop))
            await until(lambda: sent(local_objects))
            stop.set()
            await asyncio.wait_for(serving, 20)
            await run.flush()
            assert api.batches["batch-0"]["status"] == "cancelled"
            progress = run.progress()
            assert (progress.ok, progress.dead, progress.in_flight) == (7, 0, 0)
            assert len(journaled(store)) == 7 and not records(local_objects)
            api.ends = True
            async with asyncio.timeout(30):
                await run.serve(leased(api))
            run.close()
            assert run.missing() == [] and len(api.asked) == 30 + 23

    asyncio.run(work())


def test_a_terminated_run_has_its_batch_cancelled_and_the_next_one_takes_what_it_finished(
    local_objects: Objects,
) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(30))

    async def work() -> None:
        async with fake_batch_api(MODEL, ends=False, finished=7) as api:
            terminated = a_run(store, manifest, "run-1", policy=POLICY)
            serving = asyncio.create_task(terminated.serve(leased(api)))
            await until(lambda: sent(local_objects))
            terminated.ending = True
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            assert api.batches["batch-0"]["status"] in ("cancelling", "cancelled")
            (record,) = records(local_objects)
            assert range_of(local_objects, record) == terminated.identity.key_range == ("00000", "00002")
            api.ends = True
            run = a_run(store, manifest, "run-2", policy=POLICY)
            async with asyncio.timeout(30):
                await run.serve(leased(api))
            run.close()
            assert run.missing() == [] and run.progress().dead == 0 and len(api.asked) == 30 + 23

    asyncio.run(work())


def test_rows_that_come_back_wrong_wait_for_another_engine_and_the_others_are_not_kept_waiting(
    local_objects: Objects,
) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(30))

    def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        return [line(one) for one in asked if "is 1 plus" not in one["body"]["messages"][-1]["content"]], []

    async def work() -> None:
        async with fake_batch_api(MODEL, answer=answer) as api:
            run, stop = a_run(store, manifest, "run-1", policy=POLICY), asyncio.Event()
            serving = asyncio.create_task(run.serve(leased(api, replace(LIMITS, elsewhere=True)), stop))
            await until(lambda: run.progress().only_held_back)
            assert (run.progress().ok, run.progress().held_back, len(api.batches)) == (29, 1, 1)
            stop.set()
            await asyncio.wait_for(serving, 20)
            assert run.progress().queued == 1 and not run.progress().held_back
            api.answer = lambda asked: ([line(one) for one in asked], [])
            async with asyncio.timeout(30):
                await run.serve(leased(api))
            run.close()
            assert run.missing() == [] and run.progress().ok == 30 and not records(local_objects)

    asyncio.run(work())


def test_a_range_that_is_done_leaves_nothing_at_the_provider_of_what_killed_runs_have_sent(
    local_objects: Objects,
) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(30))
    kept = StoredBatches(local_objects, "d")

    async def work() -> FakeBatchApi:
        async with fake_batch_api(MODEL) as api:
            run = a_run(store, manifest, "run-1", policy=POLICY)
            engine = leased(api)
            async with run._batch_client(LIMITS)(api.url, run.generation) as client:
                place = client._place
            for number, (name, labels) in enumerate({
                "open": {RANGE: "00000-00001"}, "over": {RANGE: "00001-00002"},
                "uploaded": {RANGE: "00000-00002"}, "elsewhere": {RANGE: "00000-00005"}, "unknown": {},
            }.items()):  # fmt: skip
                record = SubmittedBatch(key=f"{number:032x}", place=place, created_at=time.time(), labels=labels)
                api.files[name], api.names[name] = b"", record.file_name
                if name != "uploaded":
                    api.batches[f"b-{name}"] = {
                        "id": f"b-{name}", "input_file_id": name, "created_at": 1.0, "output_file_id": f"output-{name}",
                        "status": "in_progress" if name == "open" else "completed", "error_file_id": None,
                    }  # fmt: skip
                    api.files[f"output-{name}"] = b""
                    record = record.model_copy(update={"input_file_id": name, "batch_id": f"b-{name}"})
                kept.keep(record)
            end = api.end
            api.end = lambda batch: None if batch["id"] == "b-open" else end(batch)  # type: ignore[method-assign]
            async with asyncio.timeout(30):
                await run.serve(engine)
            run.close()
            return api

    api = asyncio.run(work())
    assert {record.key[-1] for record in kept.all()} == {"0", "3", "4"}
    assert api.batches["b-open"]["status"] == "cancelling", "nobody needs its answers: what is not done is not paid"
    left = {"open", "output-open", "elsewhere", "output-elsewhere", "unknown", "output-unknown"}
    assert set(api.files) - api.deleted == left


@pytest.mark.parametrize("ended", ["expired", "cancelled"])
def test_batches_that_expire_or_are_cancelled_by_somebody_make_no_dead_letters(
    local_objects: Objects, ended: str
) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(30))

    async def work() -> None:
        async with fake_batch_api(MODEL, status=ended) as api:

            def answer(asked: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
                api.status = "completed" if len(api.batches) >= 5 else ended
                return [line(one) for one in (asked if len(api.batches) > 5 else asked[:1])], []

            api.answer = answer
            run = a_run(store, manifest, "run-1", policy=POLICY)
            async with asyncio.timeout(60):
                await run.serve(leased(api))
            run.close()
            assert (run.progress().ok, run.progress().dead) == (30, 0)
            assert not records(local_objects) and api.deleted == set(api.files)

    asyncio.run(work())


def test_a_row_for_which_its_whole_file_is_refused_is_one_dead_letter(local_objects: Objects) -> None:
    store = DatasetStore(local_objects, "d")
    manifest = write_snapshot(store, questions(30))

    async def work() -> None:
        async with fake_batch_api(MODEL) as api:
            end = api.end

            def checked(batch: dict[str, Any]) -> None:
                said = [one["body"]["messages"][-1]["content"] for one in api.lines(batch["input_file_id"])]
                bad = [number for number, text in enumerate(said, 1) if "is 7 plus" in text]
                errors = [{"code": "invalid_request", "message": "no", "param": None, "line": one} for one in bad]
                if errors:
                    batch |= {"status": "failed", "errors": {"object": "list", "data": errors}}
                else:
                    end(batch)

            api.end = checked  # type: ignore[method-assign]
            run = a_run(store, manifest, "run-1", policy=POLICY)
            async with asyncio.timeout(30):
                await run.serve(leased(api))
            run.close()
            assert (run.missing(), run.progress().ok, run.progress().dead) == ([], 29, 1)
            assert len(api.batches) == 2 and not records(local_objects)

    asyncio.run(work())
