"""Specs of datasets for tests."""

from __future__ import annotations

from typing import Any

from batch_assets.spec.models import GeneratedDatasetSpec, load_spec


def spec(**attributes: Any) -> GeneratedDatasetSpec:
    least = {"name": "d", "source": {"path": "q.jsonl"}, "prompt": {"user": "{{ q }}"}, "model": "m"}
    return load_spec({**least, **attributes}, "defs.yaml")
