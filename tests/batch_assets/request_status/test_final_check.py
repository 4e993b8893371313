"""`run` ends with 0 only when `verify` would: what was damaged while it ran is made again, or it says what to do."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test
from support.dataset_project import MODEL, dataset_project
from support.healed_dataset import KINDS, QUESTIONS, SPEC, HealedDataset
from support.simulated_engine import SimulatedEngine, simulated_engine

from batch_assets.catalog import ledger
from batch_assets.cli.interrupts import Interrupted
from batch_assets.request_status.request_monitor import ProgressUpdate, RequestMonitor, RunResult
from batch_assets.tags import REFRESH_TAG
from resources.objects.store_health import GIVE_UP_SILENT_SECONDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "1000", "--max-num-seqs", "64", model=MODEL) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(engine: SimulatedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HealedDataset]:
    """A dataset that was generated and published, with duplicates, a reject and a dead letter."""
    folder = tmp_path_factory.mktemp("site")
    with dataset_project(folder, **SPEC) as found:
        site = HealedDataset(found, engine)
        found.source([*QUESTIONS, QUESTIONS[0], "word " * 40_000])
        with (folder / "questions.jsonl").open("a") as file:
            file.write("broken\n")
        assert site.run().ok
        yield site


@pytest.fixture
def site(whole: HealedDataset) -> Iterator[HealedDataset]:
    """Left as it was found: what a test damages is made again afterwards, or it fails here."""
    yield whole
    if not whole.verify().ok:
        assert whole.run().ok
        assert whole.verify().ok


def flip(data: bytes, draw: random.Random) -> bytes:
    place, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
    return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]


def ended(site: HealedDataset, damage: Callable[[], object]) -> tuple[RunResult, list[str]]:
    """A request whose refresh has read the source; then the damage; then to its end. And what was remarked."""
    asked = site.site.materialize("prompts", tags={REFRESH_TAG: "d"})
    damage()
    follower, remarks = RequestMonitor(site.observer, asked.run_id), list[str]()
    for _ in range(10):
        moment = follower.look()
        remarks += [moment.remark] if moment.remark else []
        if moment.ending is not None:
            return moment.ending, remarks
        site.step()
    raise AssertionError(f"no end: {moment.said}")


def kinds(of_snapshots: bool, first: set[str]) -> list[Any]:
    """Those of snapshots, or the others; all but the `first` are tried among the soak tests."""
    wanted = [kind for kind in KINDS if kind.startswith("snapshots/") == of_snapshots]
    return [kind if kind in first else pytest.param(kind, marks=pytest.mark.soak("rows")) for kind in wanted]


@pytest.mark.parametrize("kind", kinds(False, {"batch", "dead_letters/parquet", "published/CURRENT", "published/part"}))
def test_a_bit_that_is_flipped_before_run_is_noticed_and_made_again(site: HealedDataset, kind: str):
    path = site.paths()[kind]
    before = site.site.store.objects.get(path)
    site.site.store.objects.put(path, flip(before, random.Random(kind)))
    assert not site.verify().ok
    ending = site.run()
    assert ending.ok
    assert ending.verification is not None
    assert site.verify().ok


@pytest.mark.parametrize("kind", kinds(True, {"snapshots/CURRENT", "snapshots/manifest", "snapshots/prompts"}))
def test_a_bit_that_is_flipped_in_a_snapshot_while_run_works_ends_it_with_the_command_that_mends_it(
    site: HealedDataset, kind: str
):
    objects, path = site.site.store.objects, site.paths()[kind]
    ending, _ = ended(site, lambda: objects.put(path, flip(objects.get(path), random.Random(kind))))
    assert not ending.ok
    assert "`batch-assets run d` mends it" in ending.said
    assert not site.verify().ok
    assert site.run().ok


def test_a_current_snapshot_that_is_deleted_while_run_works_ends_it_with_the_command_that_mends_it(site: HealedDataset):
    objects, path = site.site.store.objects, site.paths()["snapshots/CURRENT"]
    ending, _ = ended(site, lambda: objects.delete([path]))
    assert not ending.ok
    assert "expected a current snapshot, found none" in ending.said and "`batch-assets run d` mends it" in ending.said
    assert site.run().ok and site.verify().ok


def test_what_is_made_again_is_said(site: HealedDataset):
    objects, path = site.site.store.objects, site.newest("00001")
    ending, remarks = ended(site, lambda: objects.put(path, flip(objects.get(path), random.Random(1))))
    assert ending.ok
    assert len(remarks) == 1
    assert "00001: corrupt object" in remarks[0]
    assert "1 batches are void and will be generated again" in remarks[0]
    assert site.newest("00001") != path


def test_a_batch_that_no_publication_can_read_is_made_again(site: HealedDataset):
    """Its size is as the catalog says, so it is found when another batch has made a new table necessary."""
    objects, path = site.site.store.objects, site.newest("00002")
    objects.delete([site.newest("00001")])
    objects.put(path, objects.get(path)[:-1] + b"?")
    ending = site.run()
    assert ending.ok, ending.said
    assert site.newest("00002") != path and site.verify().ok


def test_a_part_of_the_same_size_is_written_again_by_the_next_publication(site: HealedDataset):
    objects, path = site.site.store.objects, site.paths()["published/part"]
    before = objects.get(path)
    objects.put(path, flip(before, random.Random(2)))
    assert site.run().ok
    assert objects.get(path) == before


def test_a_table_that_says_something_else_than_the_batches_is_written_again(site: HealedDataset):
    store = site.site.store
    table = site.observer.table()
    assert table is not None
    wrong = table.model_copy(update={"completion_tokens": table.completion_tokens + 1})
    ending, remarks = ended(site, lambda: store.objects.put(f"{table.path}/manifest.json", wrong.to_json()))
    assert ending.ok
    assert "wrong table counts" in remarks[0]
    assert site.observer.table() is not None


def test_a_catalog_that_counts_wrong_is_corrected(site: HealedDataset):
    entry = site.site.store.entries(site.site.manifest().snapshot)[2]
    batch = site.site.store.current_objects([entry])[entry.key]
    footer = site.site.store.read_batch(batch)[1].model_copy(update={"ok": 1, "dead": 9})
    event = ledger.batch_event(site.site.store, footer, site.site.manifest().snapshot)
    site.site.instance.report_runless_asset_event(event)
    assert [one.kind for one in site.verify().differences] == ["wrong_catalog_counts"] * 2
    assert site.run().ok


def test_what_cannot_be_made_again_ends_the_run_after_two_tries(site: HealedDataset):
    objects, path = site.site.store.objects, site.paths()["published/part"]
    whole = objects.get(path)
    asked = site.site.materialize("prompts", tags={REFRESH_TAG: "d"})
    follower, remarks = RequestMonitor(site.observer, asked.run_id), 0
    for _ in range(10):
        objects.put(path, flip(whole, random.Random(3)))  # a disk that does so again and again
        moment = follower.look()
        remarks += bool(moment.remark)
        if moment.ending is not None:
            break
        site.step()
    assert moment.ending is not None
    assert not moment.ending.ok
    assert remarks == 2
    assert "after it was made again; see `batch-assets verify d`" in moment.ending.said
    objects.put(path, whole)


def test_what_another_run_changes_is_verified_after_it(site: HealedDataset):
    objects, path = site.site.store.objects, site.newest("00001")
    whole = objects.get(path)
    asked = site.site.materialize("prompts", tags={REFRESH_TAG: "d"})
    other = create_run_for_test(site.site.instance, job_name="d_publish", status=dg.DagsterRunStatus.STARTED)
    objects.put(path, flip(whole, random.Random(5)))
    follower = RequestMonitor(site.observer, asked.run_id)
    moment = follower.look()
    assert (moment.ending, moment.remark) == (None, "")
    assert "other runs of this dataset are under way" in moment.said
    assert not any(version.void for version in ledger.ledger_versions(site.site.instance, "d").values())
    objects.put(path, whole)
    site.site.instance.delete_run(other.run_id)
    ending = follower.look().ending
    assert ending is not None
    assert ending.ok


def test_without_verification_names_and_sizes_are_compared_and_the_end_says_so(site: HealedDataset):
    objects, path = site.site.store.objects, site.newest("00001")
    whole = objects.get(path)
    asked = site.site.materialize("prompts", tags={REFRESH_TAG: "d"})
    objects.put(path, flip(whole, random.Random(4)))
    ending = RequestMonitor(site.observer, asked.run_id, verifies=False).look().ending
    assert ending is not None
    assert ending.ok
    assert ending.verification is None
    objects.put(path, whole[:-1])
    ending = RequestMonitor(site.observer, asked.run_id, verifies=False).look().ending
    assert ending is not None
    assert not ending.ok
    objects.put(path, whole)


def test_a_verification_says_where_it_is_and_is_ended_by_its_progress(site: HealedDataset):
    said: list[str] = []

    def progress(moment: ProgressUpdate) -> None:
        assert moment.phase == "verify"
        said.append(moment.said)
        if len(said) == 4:
            raise Interrupted

    asked = site.site.materialize("prompts", tags={REFRESH_TAG: "d"})
    with pytest.raises(Interrupted):
        RequestMonitor(site.observer, asked.run_id, progress=progress).look()
    batches = site.site.manifest().batches
    assert said[:3] == ["verifying: snapshot", f"verifying: batch 1 of {batches}", f"verifying: batch 2 of {batches}"]


def test_a_store_that_stays_away_ends_the_command_after_as_long_as_it_ends_a_run(site: HealedDataset):
    asked = site.site.materialize("prompts", tags={REFRESH_TAG: "d"})
    now = [1000.0]
    follower = RequestMonitor(site.observer, asked.run_id, lambda: now[0])
    assert follower.look().ending is not None
    folder = site.site.folder / "store"
    folder.rename(site.site.folder / "away")
    try:
        moment = follower.look()
        assert (moment.ending, "does not answer since" in moment.said) == (None, True)
        now[0] += GIVE_UP_SILENT_SECONDS - 1
        assert follower.look().ending is None
        now[0] += 2
        ending = follower.look().ending
    finally:
        (site.site.folder / "away").rename(folder)
    assert ending is not None
    assert not ending.ok
    assert "goes on when it is back" in ending.said


DAMAGES = 12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(DAMAGES))
@pytest.mark.parametrize("when", ["before", "while"])
def test_run_ends_with_0_exactly_when_verify_would(site: HealedDataset, seed: int, when: str):
    """Random damage to one to three objects: flipped, cut, deleted, or two of them swapped."""
    draw, folder = random.Random(f"{when} {seed}"), site.site.folder
    shutil.copytree(folder / "store", folder / "copy")

    def damage() -> None:
        objects = site.site.store.objects
        paths = [info.path for info in objects.list("d/")]
        for _ in range(draw.randint(1, 3)):
            path, other = draw.sample(paths, 2)
            kind = draw.choice(["flip", "flip", "cut", "delete", "swap"])
            with contextlib.suppress(FileNotFoundError, ValueError):
                data = objects.get(path)
                if kind == "flip":
                    objects.put(path, flip(data, draw))
                elif kind == "cut":
                    objects.put(path, data[: draw.randrange(len(data))])
                elif kind == "delete":
                    objects.delete([path])
                else:
                    objects.put(path, objects.get(other))
                    objects.put(other, data)

    try:
        if when == "before":
            damage()
            ending = site.run()
            assert ending.ok  # all of it can be made again
        else:
            ending, _ = ended(site, damage)
        assert ending.ok == site.verify().ok, (ending.said, site.verify().differences)
    finally:
        shutil.rmtree(folder / "copy")
