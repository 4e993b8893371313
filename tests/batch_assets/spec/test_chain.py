"""Which dataset is made before which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from batch_assets.component import chain_jobs
from batch_assets.spec.chain import ChainError, steps_to, upstream_of
from batch_assets.spec.models import GeneratedDatasetSpec, load_spec

READS = {"topics": None, "questions": "topics", "answers": "questions", "grades": "answers", "hints": "questions"}


def chained(reads: Mapping[str, str | None]) -> dict[str, GeneratedDatasetSpec]:
    def one(name: str, before: str | None) -> GeneratedDatasetSpec:
        source: dict[str, Any] = {"grid": {"q": ["a"]}} if before is None else {"dataset": before}
        return load_spec({"name": name, "source": source, "prompt": {"user": "{{ q }}"}, "model": "m"}, "f")

    return {name: one(name, before) for name, before in reads.items()}


def test_the_steps_to_a_dataset_are_in_the_order_in_which_they_are_made():
    specs = chained(READS)
    assert steps_to(specs, "answers") == ["topics", "questions", "answers"]
    assert steps_to(specs, "hints") == ["topics", "questions", "hints"]
    assert steps_to(specs, "topics") == ["topics"]


def test_the_table_of_a_dataset_that_is_not_declared_is_one_of_others():
    specs = chained({"answers": "questions"})
    assert upstream_of(specs["answers"], specs) is None
    assert steps_to(specs, "answers") == ["answers"]


def test_datasets_that_read_each_other_are_an_error_and_have_no_job():
    specs = chained({"one": "two", "two": "one", "apart": None})
    with pytest.raises(ChainError, match="two reads one reads two"):
        steps_to(specs, "two")
    assert chain_jobs(specs) == []


def test_each_dataset_below_another_has_a_job_for_all_steps():
    jobs = chain_jobs(chained(READS))
    assert [job.name for job in jobs] == [
        f"{name}_refresh_upstream" for name in ("answers", "grades", "hints", "questions")
    ]
    assert jobs[0].tags == {"batch/refresh": "topics", "batch/upstream": "answers"}
