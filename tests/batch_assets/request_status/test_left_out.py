"""What `run` and `status` say of rows of the source that are left out."""

from __future__ import annotations

from pathlib import Path

from support.dataset_project import dataset_project

from batch_assets.cli.dataset_commands.run_summary import left_out_lines
from batch_assets.request_status.dataset_status import Observer, dataset_status
from batch_assets.request_status.display import left_out_lines as status_lines


def test_rows_that_are_left_out_are_counted_with_the_first_reason_and_the_place_of_the_list(tmp_path: Path) -> None:
    with dataset_project(tmp_path, on_bad_row="skip") as site:
        site.source(["a", "b"])
        with (tmp_path / "questions.jsonl").open("a") as file:
            file.write("broken\n" * 8)
        assert site.materialize("prompts").success
        status = dataset_status(Observer(site.instance, site.fleet_db, site.store), now=0.0)
        path = site.store.snapshot_path(str(status.snapshot), "rejects.parquet")
        count, place = left_out_lines(site.store, status)
        site.store.objects.delete([path])
        assert left_out_lines(site.store, status)[0] == "d: 8 of 10 rows of the source are left out (on_bad_row: skip)"
    assert (status.rows, status.source_rows, status.rejected) == (2, 10, 8)
    assert count.startswith(
        "d: 8 of 10 rows of the source are left out (on_bad_row: skip), the first: questions.jsonl, "
    )
    assert "questions.jsonl, line 3: " in count and "JSON" in count
    assert place == f"left out: {site.store.objects.uri(path)}"
    assert status_lines(status) == [
        f"d: 8 of 10 rows of the source are left out (on_bad_row: skip): {site.store.objects.uri(path)}"
    ]
