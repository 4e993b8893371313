"""A tenant never holds more than it may: whatever is asked for at the same moment, in both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fleet_databases import postgres_url, sqlite_url

from batch_assets.api.access.quotas import Quotas
from batch_assets.api.access.rate_limits import TenantLimits, too_many
from batch_assets.api.access.token_bucket import take
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords, new_batch_id
from batch_assets.api.database.file_records import FileRecord, FileRecords, new_file_id
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import ACCEPT
from batch_assets.api.files.upload import LineCount
from batch_assets.api.requests.api_error import ApiError

LIMITS = TenantLimits(queued_lines=5_000, open_batches=100, storage_bytes=3_000)


@pytest.fixture(params=["sqlite", "postgres"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Records]:
    sqlite = request.param == "sqlite"
    with sqlite_url(tmp_path) if sqlite else postgres_url(request.getfixturevalue("server")) as url:
        opened = Records(url)
        yield opened
        opened.close()


def file_of(records: Records, tenant: str, lines: int | None) -> FileRecord:
    file = FileRecord(new_file_id(), tenant, "batch", "in.jsonl", 10, 1, None, lines)
    FileRecords(records).add(file)
    return file


def created(records: Records, file: FileRecord) -> str | ApiError:
    """A batch of this file, within LIMITS: its id, or why there is none."""
    batch = BatchRecord(new_batch_id(), file.tenant, "/v1/embeddings", file.id, "24h", 100, 200, "digest")
    check = Quotas.of_new_batch(file.tenant, LIMITS, file.lines or 0)
    try:
        return BatchRecords(records).create(batch, check=check).id
    except ApiError as refused:
        return refused


def at_once(calls: list[Callable[[], str | ApiError]]) -> list[str | ApiError]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


@pytest.mark.slow
def test_of_batches_created_at_the_same_moment_those_are_refused_that_would_be_too_much(records: Records) -> None:
    files = [file_of(records, "t", 4_000) for _ in range(6)] + [file_of(records, "other", 4_000)]
    made = at_once([lambda file=file: created(records, file) for file in files])  # type: ignore[misc]
    assert len([one for one in made[:6] if isinstance(one, str)]) == 1 and isinstance(made[6], str)
    refused = next(one for one in made if isinstance(one, ApiError))
    assert "queued lines: limit 5,000, held 4,000, requested 4,000" in refused.message
    assert "Retry-After" in refused.headers and "x-should-retry" not in refused.headers
    assert Quotas(records).held("t").queued_lines == 4_000
    assert isinstance(created(records, file_of(records, "t", 1_000)), str), "the limit itself is granted"


def test_a_batch_that_is_larger_than_the_limit_alone_is_not_to_be_sent_again(records: Records) -> None:
    refused = created(records, file_of(records, "t", 5_001))
    assert isinstance(refused, ApiError) and (refused.status, refused.code) == (429, "quota_exceeded")
    assert refused.headers == {"x-should-retry": "false"}


def test_after_validation_the_lines_without_an_outcome_count(records: Records) -> None:
    batches = BatchRecords(records)
    made = created(records, file_of(records, "t", 4_000))
    assert isinstance(made, str)
    held = batches.claim(made, "w", 1.0, 5.0)
    assert held is not None and batches.move(held, ACCEPT, 2, total=3_990, model="m")
    assert Quotas(records).held("t").queued_lines == 3_990
    batches.count(held, 2_000, 500)
    assert Quotas(records).held("t").queued_lines == 1_490
    assert isinstance(created(records, file_of(records, "t", 3_510)), str)


def test_of_files_added_at_the_same_moment_those_are_refused_that_would_be_too_much(records: Records) -> None:
    def add() -> str | ApiError:
        file = FileRecord(new_file_id(), "t", "batch", "in.jsonl", 2_000, 1)
        try:
            FileRecords(records).add(file, Quotas.of_new_file("t", LIMITS, 2_000))
        except ApiError as refused:
            return refused
        return file.id

    made = at_once([add] * 6)
    assert len([one for one in made if isinstance(one, str)]) == 1
    assert Quotas(records).held("t").storage_bytes == 2_000
    refused = next(one for one in made if isinstance(one, ApiError))
    assert refused.headers == {"x-should-retry": "false"}, "files stay until somebody deletes them"


def test_a_request_of_more_tokens_than_a_minute_has_is_not_to_be_sent_again() -> None:
    assert too_many("tokens", 100, 101, take(None, 100, 101, 0.0)).headers["x-should-retry"] == "false"
    later = too_many("tokens", 100, 60, take(take(None, 100, 60, 0.0).level, 100, 60, 0.0)).headers
    assert "x-should-retry" not in later and "Retry-After" in later


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("content", "lines"),
    [(b"", 0), (b"\n\n", 0), (b"a", 1), (b"a\n", 1), (b"a\n\n \n", 1), (b"\na\n\nb\r\n", 4), (b"a\nb\nc", 3)],
)
def test_lines_are_counted_in_parts_of_any_size_as_a_batch_has_them(content: bytes, lines: int, size: int) -> None:
    count = LineCount()
    for start in range(0, len(content), size):
        count.add(content[start : start + size])
    assert count.lines == lines
