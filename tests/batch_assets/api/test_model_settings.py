"""Aliases: listed, asked for, and charged as the model behind them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.api_service import api_service, line
from support.simulated_engine import simulated_engine

from batch_assets.api.settings import ModelSettings, ModelSettingsError, read_model_settings

SETTINGS = ModelSettings(aliases={"fast": "tiny", "gone": "nobody"})


def test_a_batch_may_name_an_alias(tmp_path: Path) -> None:
    async def steps(url: str) -> None:
        async with api_service(tmp_path, url, models=SETTINGS) as site:
            names = [one["id"] for one in (await site.client.get("/v1/models")).json()["data"]]
            assert names == ["tiny", "fast"], "an alias of what nobody serves is not there"
            assert (await site.client.get("/v1/models/fast")).json()["id"] == "fast"
            assert (await site.client.get("/v1/models/gone")).json()["error"]["code"] == "model_not_found"
            lines = [line("a", model="fast"), line("b", model="tiny")]
            ended = await site.until((await site.create(lines))["id"])
            output, errors = await site.results(ended)
            assert ended["status"] == "completed" and ended["model"] == "tiny" and len(output) == 2 and not errors
            refused = await site.until((await site.create([line("a", model="gone")]))["id"])
            assert refused["errors"]["data"][0]["code"] == "model_not_found"
            assert [one.key.model for one in site.app.state.ledger.lines()] == ["tiny"]

    with simulated_engine("--speed", "50", model="tiny") as engine:
        asyncio.run(steps(engine.url))


def test_settings_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    assert read_model_settings(path) == ModelSettings()
    path.write_text("aliases: {fast: org/m}\nreserve: {org/m: 2}\n")
    found = read_model_settings(path)
    assert found.resolve("fast") == "org/m" and found.resolve("org/m") == "org/m" and found.reserve == {"org/m": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("aliases: {a: b, b: c}", "alias"),
        ("aliases: {a: b}\nreserve: {a: 1}", "alias"),
        ("aliases: {a: a}", "alias"),
        ("reserve: {m: -1}", "reserve"),
        ("reserve: {m: 1.5}", "reserve"),
        ("alias: {}", "alias"),
        ("aliases: [", "line"),
    ],
)
def test_settings_that_cannot_be_used_are_one_clear_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ModelSettingsError, match=said) as found:
        read_model_settings(path)
    assert str(path) in str(found.value) and "\n" not in str(found.value)
