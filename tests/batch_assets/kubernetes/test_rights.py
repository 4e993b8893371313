"""Which right is missing is said, and what goes wrong without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.fake_kubernetes import FakeCluster, fake_cluster, write_kubeconfig

from batch_assets.cli.fleet_commands import fleet_check
from batch_assets.cli.fleet_commands.fleet_check import UnknownAccount, show_rights
from batch_assets.kubernetes.rights import RIGHTS, Account, Cluster, check_rights
from gpu_runner.providers.checks import CheckOutcome
from gpu_runner.providers.kubernetes.api import ClusterApi

OK, WARNING, FAILED = CheckOutcome.OK, CheckOutcome.WARNING, CheckOutcome.FAILED


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster() as found:
        yield found


@pytest.fixture
def api(cluster: FakeCluster, tmp_path: Path) -> ClusterApi:
    return ClusterApi(Cluster("runs", kubeconfig=write_kubeconfig(tmp_path / "kubeconfig", cluster.url)))


@pytest.mark.parametrize("account", Account)
def test_all_rights_are_asked_for(api: ClusterApi, account: Account):
    found = check_rights(api, account)
    assert [one.outcome for one in found] == [OK] * len(RIGHTS[account])


@pytest.mark.parametrize("right", RIGHTS[Account.DAEMON], ids=lambda right: str(right.verb))
def test_each_missing_right_is_named_with_its_consequence(cluster: FakeCluster, api: ClusterApi, right):
    cluster.forbidden = {(right.verb.verb, right.verb.name)}
    (missing,) = (one for one in check_rights(api, Account.DAEMON) if one.outcome is not OK)
    assert missing.outcome is (FAILED if right.required else WARNING)
    assert missing.found.startswith(f"missing: {right.verb}") and missing.found.endswith(right.without)
    assert missing.remedy.startswith(f"allow the verb {right.verb.verb} on {right.verb.name} in ")


def test_an_api_server_that_is_away_is_one_failure(cluster: FakeCluster, api: ClusterApi):
    cluster.fault = lambda method, path: 503
    (found,) = check_rights(api, Account.WEBSERVER)
    assert (found.outcome, "503" in found.found or "fault" in found.found) == (FAILED, True)


def test_the_command_says_what_to_allow_in_one_line(
    cluster: FakeCluster, api: ClusterApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(fleet_check, "ClusterApi", lambda address: api)
    assert show_rights("webserver", "runs", as_json=False) == 0
    capsys.readouterr()
    cluster.forbidden = {("delete", "pods"), ("list", "pods")}
    assert show_rights("webserver", "runs", as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "The webserver's account cannot work in namespace runs: allow the verb list on pods in its Role in namespace "
        "runs; allow the verb delete on pods in its Role in namespace runs"
    )
    assert show_rights("webserver", "runs", as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["failed"] is True


def test_an_account_that_there_is_not_is_refused():
    with pytest.raises(UnknownAccount, match="expected one of daemon, webserver, worker, found 'root'"):
        show_rights("root", "runs", as_json=False)


def test_every_account_that_looks_at_nodes_is_bound_to_the_role_that_reads_them():
    found = list(yaml.safe_load_all((Path(__file__).parents[3] / "deploy/kubernetes/accounts.yaml").read_text()))
    (role,) = (one for one in found if one["kind"] == "ClusterRole")
    (binding,) = (one for one in found if one["kind"] == "ClusterRoleBinding")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]
    assert {one["name"] for one in binding["subjects"]} == {"daemon", "run-worker", "code-location"}
    verbs = {right.verb.verb for right in RIGHTS[Account.WORKER] if right.verb.name == "nodes" and not right.required}
    assert verbs == {"get", "list"}
