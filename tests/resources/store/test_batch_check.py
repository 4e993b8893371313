"""A stored batch that is not what its name and footer say is never taken for a whole one."""

from __future__ import annotations

import io
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.snapshots import commit, current_path, overwrite, questions, write_snapshot
from support.timing import SOAK

from resources.objects.opening import CorruptObject, Objects
from resources.store.dataset_store import FOOTER_KEY, BatchEntry, BatchFooter, BatchObject, DatasetStore, check_object


class Stored:
    """The last of five batches, with seven rows, one of them dead."""

    def __init__(self, objects: Objects) -> None:
        self.store = DatasetStore(objects, "sums")
        manifest = write_snapshot(self.store, questions(47))
        self.footer = commit(self.store, manifest, dead=["id-000040"])["00004"]
        self.path = current_path(self.store, manifest, "00004")
        self.entry: BatchEntry = self.store.entries(manifest.snapshot)[4]
        self.batch: BatchObject = self.store.current_objects([self.entry])["00004"]

    def check(self) -> BatchFooter:
        return check_object(self.store, self.entry, self.batch)

    def rewrite(self, change: Callable[[pa.Table], pa.Table], **footer: object) -> None:
        """Put a file in its place that is whole Parquet but says something else."""
        table = pq.read_table(io.BytesIO(self.store.objects.get(self.path)))
        said, sink = self.footer.model_copy(update=footer), io.BytesIO()
        pq.write_table(change(table).replace_schema_metadata({FOOTER_KEY: said.model_dump_json()}), sink)
        overwrite(self.store, self.path, sink.getvalue())


@pytest.fixture
def stored(local_objects: Objects) -> Stored:
    return Stored(local_objects)


def without_outputs(table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index("output"), "output", pa.nulls(len(table), pa.string()))


def test_a_whole_batch_has_the_footer_it_was_written_with(stored: Stored) -> None:
    footer = stored.check()
    assert (footer.key, footer.rows, footer.ok, footer.dead) == ("00004", 7, 6, 1)


@pytest.mark.parametrize(
    ("change", "footer", "said"),
    [
        (lambda table: table.take(list(range(6, -1, -1))), {}, "its rows are not those of data version"),
        (lambda table: table.slice(1), {"rows": 6}, "its rows are not those of data version"),
        (without_outputs, {}, "a row has both an output and an error, or neither"),
        (lambda table: table, {"completion_tokens": 1}, "its footer says completion_tokens 1, its rows say"),
        (lambda table: table, {"dataset": "other"}, "its footer says dataset other, its rows say sums"),
    ],
    ids=["other order", "a row less", "no output", "wrong tokens", "another dataset"],
)
def test_a_batch_that_says_something_else_is_refused_with_what(
    stored: Stored, change: Callable[[pa.Table], pa.Table], footer: dict[str, object], said: str
) -> None:
    stored.rewrite(change, **footer)
    with pytest.raises(CorruptObject) as raised:
        stored.check()
    assert stored.path in str(raised.value) and said in str(raised.value)


@pytest.mark.slow
def test_no_flipped_byte_changes_a_row_unnoticed(stored: Stored) -> None:
    """What no checksum covers is the Parquet footer (statistics, say); no flip there may change what is read."""
    store, path = stored.store, stored.path
    whole, rows = store.objects.get(path), store.batch_table(stored.batch)
    noticed = 0
    places = range(0, len(whole), 5 if SOAK else 17)
    for place in places:
        overwrite(store, path, whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            stored.check()
        except CorruptObject:
            noticed += 1
        else:
            assert store.batch_table(stored.batch).equals(rows), place
    assert noticed > len(places) * 0.5
