"""`batch-assets offers NAME`: the work in hand, the ranking, the refusals; and what the section `hardware` means."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from support.market_offers import H100, L4, T4, FakeProvider
from support.snapshots import commit, questions, write_snapshot
from typer.testing import CliRunner, Result

from batch_assets.capacity_planning import workload_estimate
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.cli.fleet_commands import offers as offers_command
from batch_assets.cli.main import app
from batch_assets.component import spec_version
from batch_assets.spec.models import GeneratedDatasetSpec, SpecError, load_spec
from gpu_runner.offers.offer import Offer, OfferFilter
from gpu_runner.offers.speed import GIB, Measurement
from resources.objects.opening import Objects
from resources.pricing.market import Market
from resources.store.dataset_store import DatasetStore

FLEET_MARKET = offers_command.fleet_market
SPEC: dict[str, Any] = {
    "name": "haiku",
    "source": {"grid": {"topic": ["rain", "snow", "wind"]}},
    "prompt": {"system": "You are terse.", "user": "A haiku about {{ topic }}."},
    "model": "Qwen/Qwen3-8B",
    "sampling": {"max_tokens": 200},
}


def spec(**more: Any) -> GeneratedDatasetSpec:
    return load_spec({**SPEC, **more}, "defs.yaml")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new home with one dataset, `haiku`, and a fleet of three offers."""
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("BATCH_ASSETS_FLEET_DB", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    declare(tmp_path)
    fleet(monkeypatch, [H100, L4, T4, replace(L4, instance_type="l4.1x", spot=True, price_per_hour=0.2)])
    return tmp_path


def declare(home: Path, **more: Any) -> None:
    file = home / "defs" / "haiku" / "defs.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"type": "batch_assets.GeneratedDataset", "attributes": {**SPEC, **more}}))


def fleet(patch: pytest.MonkeyPatch, offers: list[Offer], measured: tuple[Measurement, ...] = ()) -> None:
    import time

    fresh = [replace(offer, observed_at=time.time()) for offer in offers]
    patch.setattr(
        offers_command,
        "fleet_market",
        lambda: (Market([FakeProvider("north", fresh)]), list(measured), {"north": 1.0}),
    )


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, ["offers", *words], env={"COLUMNS": "200"})


def answer(*words: str) -> Any:
    found = ask("haiku", "--json", *words)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


# what is printed


def test_before_any_snapshot_it_ranks_and_says_what_it_assumed(home: Path) -> None:
    found = answer()
    assert found["dataset"] == "haiku"
    assert found["model"] == {
        "name": "Qwen/Qwen3-8B",
        "knowledge": "built in",
        "where": "built-in shapes of Qwen/Qwen3-8B",
    }
    work = found["work"]
    assert (work["rows"], work["prompt_basis"], work["completion_basis"]) == (3, "estimated", "assumed")
    assert work["prompt_tokens_per_row"] == round((14 + 19) / 4 + 2 * 4, 1)
    assert work["completion_tokens_per_row"] == 100
    assert [text.partition(":")[0] for text in work["assumptions"]] == [
        "there is no snapshot yet",
        "prompts",
        "completions",
    ]
    assert not (home / "store").exists() or not any((home / "store").iterdir())


def test_the_keys_of_the_json_are_stable(home: Path) -> None:
    found = answer()
    assert list(found) == [
        "dataset", "model", "objective", "filter", "work", "ranked", "refused", "problems", "clocks", "not_rented",
    ]  # fmt: skip
    offer = [
        "provider", "region", "instance_type", "gpu", "gpus", "gpu_memory_gib", "spot", "price_per_hour",
        "boot_seconds", "reliability", "observed_at", "source", "capacity", "by_tokens",
    ]  # fmt: skip
    speed = ["tokens_per_second", "speed_basis", "hours", "usd", "usd_per_million_tokens"]
    assert list(found["ranked"][0]) == ["rank", *offer, *speed, "placement"]
    assert list(found["ranked"][0]["placement"]) == ["tensor_parallel", "engines", "max_num_seqs", "max_model_len"]
    assert list(found["refused"][0]) == [*offer, "reasons"]


def test_the_ranking_is_best_first_and_every_refusal_has_its_reason(home: Path) -> None:
    found = answer()
    usd = [one["usd"] for one in found["ranked"]]
    assert [one["rank"] for one in found["ranked"]] == [1, 2] and usd == sorted(usd)
    said = {(one["gpu"], one["spot"]): "; ".join(one["reasons"]) for one in found["refused"]}
    assert said[("L4", True)] == "spot is not allowed"
    assert said[("T4", False)] == "T4 has no bfloat16, in which Qwen/Qwen3-8B is served"


def test_people_see_the_same(home: Path) -> None:
    shown = ask("haiku").stdout
    assert "haiku: 3 rows" in shown and "prompts estimated, completions assumed" in shown
    assert "model: Qwen/Qwen3-8B, built-in shapes" in shown
    assert "objective: cheapest; filter: no spot" in shown
    for column in ("provider", "region", "type", "GPU", "spot", "$/h", "tokens/s", "speed", "hours", "$/M tokens"):
        assert column in shown
    assert "1× H100 80 GiB" in shown and "estimate" in shown
    assert "Refused: 2" in shown and "spot is not allowed" in shown


def test_limit_shortens_the_tables_and_says_so(home: Path) -> None:
    shown = ask("haiku", "--limit", "1").stdout
    assert shown.count("more: --limit 0 shows all") == 2
    assert "more:" not in ask("haiku", "--limit", "0").stdout
    assert len(answer("--limit", "1")["ranked"]) == 2  # JSON is for machines: always whole


def test_a_gpu_on_the_command_line_takes_the_place_of_those_in_the_yaml(home: Path) -> None:
    declare(home, hardware={"gpus": ["L4"]})
    assert {one["gpu"] for one in answer()["ranked"]} == {"L4"}
    found = answer("--gpu", "h100", "--gpu", "A100")
    assert {one["gpu"] for one in found["ranked"]} == {"H100"}
    assert found["filter"]["gpus"] == ["A100", "h100"]


def test_when_nothing_can_be_rented_it_says_why(home: Path) -> None:
    declare(home, hardware={"max_price_per_hour": 0.01})
    shown = ask("haiku")
    assert shown.exit_code == 0
    assert "Nothing can be rented for it." in shown.stdout
    assert "price 2.50 $/h is above 0.01" in shown.stdout


def test_measured_speeds_of_the_fleet_are_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_runner.offers.speed import LengthMix

    measured = Measurement("Qwen/Qwen3-8B", "H100", 80, 1, LengthMix(16, 100), 1e6, 10.0)
    fleet(monkeypatch, [H100, L4], (measured,))
    found = {one["gpu"]: (one["speed_basis"], one["tokens_per_second"]) for one in answer()["ranked"]}
    assert found["H100"] == ("measured", 100_000)
    assert found["L4"][0] == "estimate"


def test_an_unreadable_source_is_an_error_of_the_user(home: Path) -> None:
    declare(home, source={"path": "missing.jsonl"})
    found = ask("haiku")
    assert found.exit_code == 2
    assert "missing.jsonl: no such file" in found.stderr
    assert "Traceback" not in found.stderr


def test_without_a_fleet_yaml_three_simulated_providers_compete(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers_command, "fleet_market", FLEET_MARKET)
    monkeypatch.delenv("BATCH_ASSETS_FLEET", raising=False)
    declare(home, model="simulated/tiny", hardware={"spot": True})
    found = answer()
    assert len({one["provider"] for one in found["ranked"]}) == 3
    assert found["problems"] == []
    assert found["model"]["knowledge"] == "assumed"
    said = ask("haiku").stdout
    assert "taken for an 8B where machines are simulated" in said
    assert set(found["clocks"].values()) == {60.0}
    assert "run 60 × as fast as real time" in said


def test_prices_of_a_cloud_without_a_provider_say_what_to_do(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers_command, "fleet_market", FLEET_MARKET)
    monkeypatch.setenv("BATCH_ASSETS_FLEET", str(home / "fleet.yaml"))
    prices = Path(__file__).parents[3] / "fixtures" / "prices" / "private.yaml"
    (home / "fleet.yaml").write_text(
        "simulated: {providers: [{name: sim, offers: [{instance_type: h, gpu: H100, price_per_hour: 2.0}]}]}\n"
        f"prices: {{lists: [{prices}]}}\n"
    )
    clouds = answer()["not_rented"]
    assert clouds and "sim" not in clouds
    said = " ".join(ask("haiku").stdout.split())
    assert f"No provider for {', '.join(clouds)}" in said
    assert "start `vllm serve` on it, and name its address under `engines`" in said


def test_a_broken_price_list_in_the_fleet_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers_command, "fleet_market", FLEET_MARKET)
    monkeypatch.setenv("BATCH_ASSETS_FLEET", str(home / "fleet.yaml"))
    default = "simulated: {providers: [{name: sim, offers: [{instance_type: h, gpu: H100, price_per_hour: 2.0}]}]}\n"
    (home / "fleet.yaml").write_text(default + f"prices: {{lists: [{home / 'none.yaml'}]}}\n")
    found = answer()
    assert [one["provider"] for one in found["ranked"]] == ["sim"]
    assert "none.yaml: expected a readable file" in found["problems"][0]
    (home / "fleet.yaml").write_text(default + f"prices: {{history: {home / 'none.csv'}}}\n")
    refused = ask("haiku")
    assert refused.exit_code == 2 and "none.csv: expected a readable file" in refused.stderr


# the work in hand


@pytest.fixture
def store(local_objects: Objects) -> DatasetStore:
    return DatasetStore(local_objects, "haiku")


def test_before_the_first_batch_lengths_are_estimated_from_the_snapshot(store: DatasetStore, tmp_path: Path) -> None:
    write_snapshot(store, questions(25))
    work = WorkloadEstimator(spec(), store, tmp_path).look()
    assert (work.rows, work.all_rows, work.prompt_basis, work.output_basis) == (25, 25, "estimated", "assumed")
    assert work.mix.prompt_tokens == pytest.approx(len("What is 12 plus 12?") / 4 + 4, rel=0.05)
    assert work.mix.output_tokens == 512  # half of the 1,024 that a row may have by default
    assert work.longest == round(len("What is 24 plus 24?") / 4 + 4 + 1024)


def test_committed_batches_say_how_long_rows_are_and_what_is_left(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(25))
    looking = WorkloadEstimator(spec(), store, tmp_path)
    assert looking.look().rows == 25
    footers = commit(store, manifest, keys=["00000"], dead=["id-000003"])
    work = looking.look()
    footer = footers["00000"]
    assert (work.rows, work.prompt_basis, work.output_basis) == (15, "measured", "measured")
    assert work.mix.prompt_tokens == footer.prompt_tokens / 9  # the dead letter counts no tokens
    assert work.mix.output_tokens == footer.completion_tokens / 9
    assert work.assumptions == ()
    commit(store, manifest)
    assert (looking.look().rows, looking.look().tokens) == (0, 0)


def test_a_new_snapshot_is_noticed(store: DatasetStore, tmp_path: Path) -> None:
    write_snapshot(store, questions(5))
    looking = WorkloadEstimator(spec(), store, tmp_path)
    assert looking.look().rows == 5
    write_snapshot(store, questions(12))
    assert looking.look().rows == 12


def test_a_damaged_batch_measures_nothing(store: DatasetStore, tmp_path: Path) -> None:
    manifest = write_snapshot(store, questions(25))
    commit(store, manifest, keys=["00000"])
    (batch,) = store.current_objects(store.entries(manifest.snapshot)).values()
    store.objects.put(store.batch_path(batch), b"torn")
    assert WorkloadEstimator(spec(), store, tmp_path).look().prompt_basis == "estimated"


def test_only_a_spread_of_batches_is_read(store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = write_snapshot(store, questions(400))
    commit(store, manifest)
    read: list[object] = []
    footer: Callable[..., Any] = DatasetStore.footer
    monkeypatch.setattr(DatasetStore, "footer", lambda self, batch: (read.append(batch), footer(self, batch))[1])
    looking = WorkloadEstimator(spec(), store, tmp_path)
    for _ in range(3):
        looking.look()
    assert len(read) == 16


def test_a_large_source_without_a_snapshot_is_counted_up_to_a_bound(store: DatasetStore, tmp_path: Path) -> None:
    many = [f"topic {i}" for i in range(300)]
    source = {"grid": {"topic": many, "number": list(range(300))}}
    work = WorkloadEstimator(spec(source=source), store, tmp_path).look()
    assert work.rows == 90_000
    assert any("has about 90,000 rows: 65,536 lines were read" in one.text for one in work.assumptions)
    limited = WorkloadEstimator(spec(source={**source, "limit": 70_000}), store, tmp_path).look()
    assert limited.rows == 70_000
    assert WorkloadEstimator(spec(source={**source, "limit": 7}), store, tmp_path).look().rows == 7


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["jsonl", "csv", "jsonl.gz", "parquet"])
def test_rows_of_many_files_are_estimated_from_the_bytes_of_all(
    store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(workload_estimate, "COUNTED_BLOCKS", 2)
    rng = random.Random(1)
    for name, rows in (("a", 3000), ("b", 500), ("c", 4500)):
        texts = [f"topic {rng.random()}" for _ in range(rows)]
        frame = pl.DataFrame({"topic": texts, "score": [i % 4 for i in range(rows)]})
        file = tmp_path / f"{name}.{ending}"
        if ending == "parquet":
            frame.write_parquet(file)
        elif ending == "csv":
            frame.write_csv(file)
        else:
            packed = gzip.compress if ending.endswith("gz") else bytes
            file.write_bytes(packed(frame.write_ndjson().encode()))

    def rows(**source: Any) -> int:
        return WorkloadEstimator(spec(source={"path": f"*.{ending}", **source}), store, tmp_path).look().rows

    assert rows() == pytest.approx(8000, rel=0.02)
    condition = "CAST(score AS INT) > 0" if ending == "csv" else "score > 0"
    assert rows(where=condition) == pytest.approx(6000, rel=0.02)
    assert rows(limit=5000) == 5000


def test_of_very_many_files_a_spread_is_looked_at(
    store: DatasetStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_estimate, "COUNTED_BLOCKS", 2)
    for i in range(40):
        (tmp_path / f"{i:02}.jsonl").write_text(f'{{"topic": "topic {i}"}}\n' * (50 + i))
    work = WorkloadEstimator(spec(source={"path": "*.jsonl"}), store, tmp_path).look()
    assert work.rows == pytest.approx(sum(50 + i for i in range(40)), rel=0.05)


def test_where_counts_only_the_rows_that_pass(store: DatasetStore, tmp_path: Path) -> None:
    source = {"grid": {"topic": ["rain", "snow"], "number": [1, 2, 3]}, "where": "number > 1"}
    assert WorkloadEstimator(spec(source=source), store, tmp_path).look().rows == 4


def test_embeddings_have_no_completion_and_ignore_eos_has_all_of_it(store: DatasetStore, tmp_path: Path) -> None:
    vectors = spec(task="embedding", prompt={"text": "{{ topic }}"}, sampling={})
    work = WorkloadEstimator(vectors, store, tmp_path).look()
    assert (work.mix.output_tokens, work.longest) == (0, 1)
    full = spec(sampling={"max_tokens": 64, "extra": {"ignore_eos": True}})
    assert WorkloadEstimator(full, store, tmp_path).look().mix.output_tokens == 64


def test_when_all_is_done_the_whole_dataset_is_ranked(home: Path) -> None:
    from resources.objects.opening import open_objects

    there = DatasetStore(open_objects(str(home / "store")), "haiku")
    commit(there, write_snapshot(there, questions(25)))
    work = answer()["work"]
    assert (work["rows"], work["prompt_basis"]) == (25, "measured")
    assert work["assumptions"] == ["nothing is left to do: ranked as if all 25 rows were to be done"]


# the section `hardware`


def test_hardware_becomes_a_filter_and_an_objective() -> None:
    wanted = spec(
        objective="fastest",
        hardware={
            "providers": ["north"], "regions": ["eu"], "gpus": ["H100", "RTX 4090"], "spot": True,
            "max_price_per_hour": 3, "min_reliability": 0.95, "max_model_len": 4096,
        },
    )  # fmt: skip
    hardware = wanted.hardware
    assert hardware.accept() == OfferFilter(
        frozenset({"north"}), frozenset({"eu"}), frozenset({"H100", "RTX 4090"}), True, 3.0, 0.95
    )
    assert (wanted.objective, hardware.max_model_len, hardware.declared("m")) == ("fastest", 4096, None)
    assert spec().hardware.accept() == OfferFilter()


def test_declared_facts_name_the_datasets_model(home: Path) -> None:
    facts = {"weights_gib": 2, "active_billions": 0.6, "kv_bytes_per_token": 0, "context": 8192}
    declared = spec(hardware={"model_facts": facts}).hardware.declared("BAAI/bge-m3")
    assert declared is not None
    assert (declared.facts.model, declared.facts.weight_bytes, declared.facts.active_parameters, declared.context) == (
        "BAAI/bge-m3", 2 * GIB, 0.6e9, 8192,
    )  # fmt: skip
    declare(home, model="our-model", hardware={"model_facts": facts})
    found = answer()
    assert found["model"]["knowledge"] == "declared"
    assert {one["gpu"] for one in found["ranked"]} == {"H100", "L4", "T4"}


def test_an_unknown_model_is_refused_with_what_to_do(home: Path) -> None:
    declare(home, model="our-model")
    found = answer()
    assert found["ranked"] == []
    assert all("hardware.model_facts" in one["reasons"][-1] for one in found["refused"])


def test_changing_the_hardware_regenerates_nothing() -> None:
    plain = spec()
    chosen = spec(
        hardware={"gpus": ["L4"], "spot": True, "max_model_len": 4096},
        deadline="6h", budget_usd=12.5, objective="fastest", max_instances=3,
    )  # fmt: skip
    assert spec_version(plain) == spec_version(chosen)
    assert plain.generation() == chosen.generation()


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ({"gpu": "H100"}, "hardware.gpu: expected a known key, found 'gpu'. Did you mean 'gpus'?"),
        ({"gpus": []}, "hardware.gpus: expected at least this many entries: 1"),
        ({"spot": "perhaps"}, "hardware.spot: expected true or false"),
        ({"max_price_per_hour": 0}, "hardware.max_price_per_hour: expected more than 0"),
        ({"min_reliability": 1.5}, "hardware.min_reliability: expected at most 1"),
        ({"model_facts": {"weights_gib": 1}}, "hardware.model_facts.active_billions: expected a value, found nothing"),
    ],
)
def test_wrong_hardware_is_refused_in_our_words(hardware: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        spec(hardware=hardware)
    assert said in str(error.value)
