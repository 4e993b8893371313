"""`batch-assets fleet check`: every provider of fleet.yaml, its exit status, and no secret in what it prints."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_kubernetes import OFFER, TOKEN, fake_cluster, write_kubeconfig
from typer.testing import CliRunner

from batch_assets.cli.fleet_commands.fleet_check import check_providers
from batch_assets.cli.main import app
from gpu_runner.providers.checks import CheckOutcome, CheckResult, CheckSubject


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BATCH_ASSETS_FLEET", str(tmp_path / "fleet.yaml"))
    return tmp_path


def check(home: Path, fleet: dict[str, Any] | None, *words: str) -> Any:
    if fleet is not None:
        (home / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    return CliRunner().invoke(app, ["fleet", "check", *words])


def test_the_embedded_providers_have_prices_and_nothing_else_to_check(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATCH_ASSETS_FLEET")
    found = check(home, None, "--json")
    assert found.exit_code == 0
    told = json.loads(found.stdout)
    assert len(told["providers"]) == 3 and not told["failed"]
    for one in told["providers"]:
        assert not one["checked"]
        (result,) = one["results"]
        assert (result["subject"], result["outcome"]) == ("prices", "ok")
    assert "there is nothing else to check" in check(home, None).stdout


def test_a_cluster_that_is_right_passes_and_one_without_rights_fails_with_the_verb(home: Path) -> None:
    with fake_cluster() as cluster:
        write_kubeconfig(home / "kubeconfig", cluster.url)
        pods = {"name": "pods", "kubeconfig": "kubeconfig", "reach": "pod_ip", "offers": [OFFER]}
        fleet = {"simulated": "default", "kubernetes": [pods]}
        found = check(home, fleet)
        assert found.exit_code == 0, found.stdout
        assert "tester at http" in found.stdout and "3.6 $/h" in found.stdout
        cluster.forbidden = {("create", "secrets")}
        found = check(home, fleet, "--json")
        assert found.exit_code == 1
        told = {one["provider"]: one for one in json.loads(found.stdout)["providers"]}
        assert told["pods"]["failed"] and told["pods"]["checked"]
        assert sum(one["failed"] for one in told.values()) == 1
        (failed,) = [one for one in told["pods"]["results"] if one["outcome"] == "failed"]
        assert (failed["subject"], failed["found"]) == ("permissions", "missing: create secrets")
        assert TOKEN not in found.stdout
        assert not cluster.pods


def test_a_cluster_that_is_away_fails(home: Path) -> None:
    with fake_cluster() as cluster:
        write_kubeconfig(home / "kubeconfig", cluster.url)
    found = check(home, {"kubernetes": [{"kubeconfig": "kubeconfig", "offers": [OFFER]}]})
    assert found.exit_code == 1
    assert "is the cluster reachable?" in found.stdout


def test_without_a_provider_it_says_so(home: Path) -> None:
    found = check(home, {"engines": [{"name": "a", "kind": "endpoint", "url": "http://127.0.0.1:1"}]})
    assert (found.exit_code, found.stdout.startswith("No provider is configured")) == (0, True)


def test_a_wrong_fleet_yaml_is_a_wrong_request(home: Path) -> None:
    assert check(home, {"kubernetes": [{"offers": []}]}).exit_code == 2


class Checked:
    """A provider with a check that answers, breaks or hangs."""

    clock, name = 1.0, "checked"

    def __init__(self, check: Any) -> None:
        self.check = check

    def offers(self) -> list[Any]:
        return []

    create = wait_ready = list = terminate = offers


def test_a_provider_that_hangs_or_breaks_hides_nothing_of_the_others() -> None:
    result = CheckResult(CheckSubject.PRICES, CheckOutcome.OK, "fine")
    released = threading.Event()
    providers = {
        "hangs": Checked(lambda: [result] if released.wait(30) else []),
        "breaks": Checked(lambda: 1 / 0),
        "works": Checked(lambda: [result]),
    }
    hangs, breaks, works = check_providers(providers, seconds=0.5)
    released.set()
    assert (hangs.failed, breaks.failed, works.failed) == (True, True, False)
    assert hangs.results[0].found == "no answer within 0 s"
    assert "ZeroDivisionError" in breaks.results[0].found
    assert works.results == (result,)
