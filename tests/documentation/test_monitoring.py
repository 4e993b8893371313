"""deploy/monitoring: each metric that dashboard and rules name is exported, each query finds something, rules fire."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.documents import REPOSITORY
from support.fleet_databases import Clock, intended, ready
from support.front_doors import front_door_alone

from batch_assets.api.billing.usage import Kind, UsageKey, Used, day_of
from batch_assets.api.billing.usage_ledger import UsageLedger
from batch_assets.api.database.batch_records import BatchRecord, BatchRecords
from batch_assets.api.database.database_figures import record_figures
from batch_assets.api.database.file_records import FileRecord
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.states import ACCEPT, COMPLETE, FINALIZE, BatchStatus
from batch_assets.api.interactive.engine_directory import EngineTarget
from batch_assets.api.interactive.proxy import Proxy
from batch_assets.api.online.online_metrics import OnlineFigures
from batch_assets.api.online.queues.queue_protocol import QueueDepth
from batch_assets.api.settings import ApiSettings
from batch_assets.api.telemetry.gauges import certificate_gauges, plan_samples, record_samples
from gpu_runner.bounded_http.tls_files import RotatingContext, TlsFiles, server_context
from gpu_runner.fleet_database.capacity_plan import CapacityPlan
from gpu_runner.fleet_database.database import FleetDatabase

FOLDER = REPOSITORY / "deploy" / "monitoring"
PREFIX = re.compile(r"\bbatch_assets_\w+")
Sample = tuple[str, dict[str, str], float]
# What Prometheus itself knows: whom it reads, and which rules fire.
PROMETHEUS_OWN = (
    'up{job="batch-assets", instance="a"}',
    'ALERTS{alertname="BatchAssetsDown", alertstate="firing", severity="page"}',
)


def panels() -> list[dict[str, Any]]:
    """Of the dashboard, without the rows that they are under."""
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def rules() -> dict[str, str]:
    """Expression of each alert, by its name."""
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """What a service with a fleet, batches, interactive requests and certificates shows to Prometheus."""
    from support.certificates import Authority

    home = tmp_path_factory.mktemp("home")
    settings = ApiSettings(home, f"{home}/store", f"sqlite:///{home}/api.db")
    with contextlib.closing(FleetDatabase(f"sqlite:///{home}/fleet.db")) as fleet_db:
        fleet_db.begin_run("run", "d", "0", "1")
        ready(fleet_db)
        target = fleet_db.begin_request("api/m", "batches since b", deadline_at=fleet_db.now() + 100)
        assert fleet_db.command("api/m", target.request, 3, (), None, target.memory, CapacityPlan(rows_left=7))
    with contextlib.closing(Records(settings.database)) as records:
        BatchRecords(records).create(BatchRecord("b", "t", "/v1/embeddings", "f", "1h", 1, 2, "d"))
    service = front_door_alone(settings)
    files = TlsFiles(*Authority().issue("service").write(home))
    service.metrics.add_gauges(lambda: certificate_gauges(RotatingContext(files, server_context), None))
    service.metrics.first_token("m", 0.1)
    service.metrics.used("m", 1, 2)
    service.metrics.committed("m", 249, 1, 1000, 2000)
    service.metrics.results_lost("m", 1, 1)
    service.metrics.engine_request("answered")
    service.metrics.answered("POST", "/v1/batches", 429, 0.1, "quota_exceeded")
    _online(service.inner.state.online._figures)

    async def page() -> str:
        async with service.inner.router.lifespan_context(service.inner), _routed(service.inner.state.proxy):
            return (await asyncio.to_thread(service.metrics.page)).decode()

    families = text_string_to_metric_families(asyncio.run(page()))
    return [(one.name, one.labels, one.value) for family in families for one in family.samples]


@contextlib.asynccontextmanager
async def _routed(proxy: Proxy) -> AsyncIterator[None]:
    """An engine that requests are sent to."""
    engine = EngineTarget("http://127.0.0.1:9", "m")
    proxy.directory.announce(engine)
    proxy.choice.poller.watch(engine)
    proxy.choice._figures.chosen("predicted", "")
    try:
        yield
    finally:
        await proxy.choice.close()


def _online(figures: OnlineFigures) -> None:
    figures.read(lambda: QueueDepth(1, 2, 3, 4), lambda: 0.5)
    figures.accepted(repeated=False)
    figures.refused("full")
    for code in ("ok", "expired", "engine_lost", "consumers_lost"):
        figures.ended(code)
    figures.retried("broken")
    figures.cache("miss")
    figures.seconds.observe(0.1)
    figures.engine("m", "answered", 0.1)


def test_every_metric_of_dashboard_and_rules_is_exported(exported: list[Sample]) -> None:
    there = {name for name, _, _ in exported}
    named = {name for query in (*dashboard_queries(), *rules().values()) for name in PREFIX.findall(query)}
    assert len(named) > 20 and named <= there, named - there


def test_values_of_labels_that_queries_name_are_exported(exported: list[Sample]) -> None:
    pattern = re.compile(r'(batch_assets_\w+)\{(\w+)=(~?)"([^"]+)"')
    for query in (*dashboard_queries(), *rules().values()):
        for name, label, matches, wanted in pattern.findall(query):
            values = {labels.get(label) for found, labels, _ in exported if found == name}
            known = {*values, "500"} if label == "status" else values  # a healthy service has no 5xx
            choices = wanted.split("|") if matches else [wanted]
            for choice in choices:
                assert any(re.fullmatch(choice, str(value)) for value in known), (query, choice, values)


def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    return found


def checked(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool(), *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_the_rules_are_valid_and_their_cases_hold() -> None:
    for arguments in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")):
        found = checked(*arguments[:2], str(FOLDER / arguments[2]))
        assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.slow
def test_every_alert_has_a_case_that_fires_and_the_cases_can_fail(tmp_path: Path) -> None:
    cases = (FOLDER / "alerts_test.yaml").read_text()
    assert {name for name in rules() if f'alertname="{name}"' not in cases} == set()
    (tmp_path / "alerts_test.yaml").write_text(cases)
    (tmp_path / "alerts.yaml").write_text((FOLDER / "alerts.yaml").read_text().replace("> 120", "> 12000"))
    assert checked("test", "rules", str(tmp_path / "alerts_test.yaml")).returncode != 0


def test_every_query_of_the_dashboard_finds_what_the_service_exports(tmp_path: Path, exported: list[Sample]) -> None:
    def series(name: str, labels: dict[str, str]) -> str:
        return name + "{" + ", ".join(f'{key}="{value}"' for key, value in labels.items()) + "}"

    named = [*PROMETHEUS_OWN, *(series(name, labels) for name, labels, _ in exported)]
    inputs = [{"series": one, "values": "1+10x60"} for one in named]
    queries = sorted({query.replace("$__rate_interval", "5m") for query in dashboard_queries()})
    expected: list[dict[str, Any]] = [
        {
            "expr": f"clamp_max(count({query}), 1)",
            "eval_time": "30m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for query in queries
    ]
    file = tmp_path / "queries_test.yaml"
    tests = [{"interval": "1m", "input_series": inputs, "promql_expr_test": expected}]
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": tests}))
    found = checked("test", "rules", str(file))
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("requests", "share"),
    [
        ({("/v1/chat/completions", "200"): 54, ("/v1/chat/completions", "500"): 6}, 0.1),
        ({("/v1/batches", "200"): 60}, 0.0),
        ({("/v1/batches", "200"): 0}, 0.0),
    ],
)
def test_the_share_of_5xx_is_of_requests_and_not_of_scrapes_and_probes(
    tmp_path: Path, requests: dict[tuple[str, str], int], share: float
) -> None:
    probes = {("/metrics", "200"): 600, ("/healthz", "200"): 600, ("/readyz", "503"): 600}
    inputs = [
        {
            "series": f'batch_assets_http_requests_total{{route="{route}", status="{status}"}}',
            "values": f"0+{count}x60",
        }
        for (route, status), count in (requests | probes).items()
    ]
    (panel,) = [one for one in panels() if one["title"] == "Requests that end with a 5xx"]
    rule = rules()["BatchAssetsErrors"]
    expected = [
        {
            "expr": panel["targets"][0]["expr"],
            "eval_time": "30m",
            "exp_samples": [{"labels": "{}", "value": share}],
        },
        {
            "expr": rule,
            "eval_time": "30m",
            "exp_samples": [{"labels": "{}", "value": share}] if share > 0.02 else [],
        },
    ]
    file = tmp_path / "share_test.yaml"
    tests = [{"interval": "1m", "input_series": inputs, "promql_expr_test": expected}]
    file.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": tests}))
    found = checked("test", "rules", str(file))
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_first_row_says_what_is_now_and_not_what_was_when_the_services_were_last_seen() -> None:
    figures = [panel for panel in panels() if panel["type"] == "stat"]
    assert len(figures) > 8 and max(panel["gridPos"]["y"] for panel in figures) < 9, "on the screen without scrolling"
    for panel in figures:
        assert all(target.get("instant") and not target["range"] for target in panel["targets"]), panel["title"]
        assert panel["options"]["graphMode"] == "none", panel["title"]  # a line needs a range


def test_panels_stand_beside_each_other_and_say_what_they_show() -> None:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    cells = [(x, y) for one in dashboard for x, y in _cells(one["gridPos"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert len({one["id"] for one in dashboard}) == len(dashboard)
    assert len({one["title"] for one in dashboard}) == len(dashboard)
    assert [panel["title"] for panel in panels() if not panel["description"]] == []


def _cells(place: dict[str, int]) -> list[tuple[int, int]]:
    return [(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])]


def test_a_stack_of_states_has_no_outline_which_the_ones_with_nothing_would_draw_over_the_others() -> None:
    stacks = [panel for panel in panels() if "stacking" in panel["fieldConfig"]["defaults"].get("custom", {})]
    assert len(stacks) > 4
    for panel in stacks:
        assert panel["fieldConfig"]["defaults"]["custom"]["lineWidth"] == 0, panel["title"]


def test_a_panel_is_red_from_where_the_rule_on_the_same_query_fires() -> None:
    limits = {}
    for expression in rules().values():
        query, compared, limit = expression.partition(" > ")
        if compared and re.fullmatch(r"[\d.]+", limit):
            limits[query] = float(limit)
    checked: set[str] = set()
    for panel in panels():
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {"steps": []})["steps"]
        reds = [step["value"] for step in steps if step["color"] == "red" and step["value"] is not None]
        for target in panel["targets"]:
            if reds and (limit := limits.get(target["expr"])) is not None:
                assert reds == [limit], panel["title"]
                checked.add(panel["title"])
    assert {"Windows that are over", "US dollars an hour", "Catalog behind", "Online: how full"} <= checked


def test_prometheus_takes_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text((FOLDER / "alerts.yaml").read_text())
    (tmp_path / "key").write_text("sk-x")
    config = (FOLDER / "prometheus.yaml").read_text().replace("/run/secrets/batch-assets-metrics", f"{tmp_path}/key")
    (tmp_path / "prometheus.yaml").write_text(config)
    found = checked("check", "config", str(tmp_path / "prometheus.yaml"))
    assert found.returncode == 0, found.stdout + found.stderr


def test_figures_of_the_records(tmp_path: Path) -> None:
    with contextlib.closing(Records(f"sqlite:///{tmp_path}/api.db")) as records:
        batches = BatchRecords(records)
        for number in range(3):
            batches.create(BatchRecord(f"b{number}", "t", "/v1/embeddings", "f", "1h", 100 + number, 200, "d"))
        for number, lines in ((1, 10), (2, 4)):
            held = batches.claim(f"b{number}", "w", 0.0, 1.0)
            assert held is not None
            batches.describe(held, lines, "m")
            batches.move(held, ACCEPT, 110)
            batches.count(held, 3, 1)
        batches.move(held, FINALIZE, 120)
        batches.move(held, COMPLETE, 130, [FileRecord("o", "t", "batch_output", "o", 77, 130)])
        ledger = UsageLedger(records)
        for day, model in ((0, "m"), (0, "unpriced"), (1, "m")):
            key = UsageKey(day_of(260.0 + day * 86_400), "t", "batch", model, Kind.COMPLETIONS)
            used = Used(input_tokens=5, output_tokens=7, unpriced_tokens=12 if model == "unpriced" else 0)
            assert ledger.apply(f"{day}-{model}", 0, 1, {key: used})
        found = record_figures(records, 260.0)
        assert dict(record_figures(records, 150.0).windows) == {"": 50.0, "m": 50.0}
    assert found.batches[BatchStatus.VALIDATING] == 1 and found.oldest[BatchStatus.VALIDATING] == 160
    assert found.batches[BatchStatus.COMPLETED] == 1 and found.batches[BatchStatus.FAILED] == 0
    assert dict(found.queued_lines) == {"": 0, "m": 6} and dict(found.windows) == {"": 0.0, "m": 0.0}
    assert (found.overdue_seconds, found.unreported, found.unreported_seconds) == (60, 1, 130)
    assert (found.stored_bytes, found.day_tokens, found.day_unpriced_tokens) == (77, 24, 12)
    samples = {(name, *labels.values()): value for name, _, labels, value in record_samples(found)}
    assert samples["batch_assets_usage_day_tokens", "true"] == samples["batch_assets_usage_day_tokens", "false"] == 12
    assert samples["batch_assets_queue_depth", "unknown"] == 0 and samples["batch_assets_queue_depth", "m"] == 6


@pytest.mark.slow
def test_figures_of_the_fleet(fleet_db: FleetDatabase, clock: Clock) -> None:
    fleet_db.begin_run("run", "d", "0", "1")
    lease = ready(fleet_db)  # 3.6 $ an hour, by a clock 60 times as fast
    clock.forward(5)
    found = fleet_db.figures()
    assert dict(found.instances) == {"intent": 0, "booting": 0, "ready": 1, "ending": 0}
    assert dict(found.leases) == {"live": 1, "draining": 0, "expired": 0}
    assert (found.runs["waiting"], found.silent_seconds) == (1, 5.0)
    assert found.usd_per_hour == pytest.approx(216)
    assert found.spent_usd == pytest.approx({"sim-north": 5 * 3.6 / 3600 * 60})
    assert sum(found.spent_usd.values()) == pytest.approx(sum(cost.usd.total for cost in fleet_db.costs()))
    clock.forward(60)  # the lease has expired
    assert dict(fleet_db.figures().leases) == {"live": 0, "draining": 0, "expired": 1}
    fleet_db.release(lease)
    fleet_db.begin_ending("ba-1", "test")
    fleet_db.ended("ba-1", None)
    assert fleet_db.figures().usd_per_hour == 0
    assert sum(fleet_db.figures().spent_usd.values()) == pytest.approx(sum(c.usd.total for c in fleet_db.costs()))


def test_figures_of_plans_are_of_models_with_open_batches(fleet_db: FleetDatabase, clock: Clock) -> None:
    ready(fleet_db, dataset="api/org/m", ttl=600)
    for name in ("api/org/m", "a-dataset"):
        target = fleet_db.begin_request(name, "batches since b", deadline_at=fleet_db.now() + 100)
        assert fleet_db.command(
            name, target.request, 3, (), None, target.memory, CapacityPlan(kind="grow", rows_left=7)
        )
    clock.forward(40)

    def figures() -> dict[tuple[str, ...], float]:
        samples = plan_samples(fleet_db.targets(), fleet_db.engines_held())
        return {
            (name.removeprefix("batch_assets_plan_"), *labels.values()): value for name, _, labels, value in samples
        }

    found = figures()
    assert found.pop(("window_seconds", "org/m")) == pytest.approx(60)
    assert found == {("engines_wanted", "org/m"): 3, ("engines_held", "org/m"): 1, ("rows_left", "org/m"): 7}
    fleet_db.begin_run("other", "a-dataset", "0", "1")
    assert fleet_db.try_lease("gpu-of-fleet-yaml", "run", "api/org/m", 600) is not None
    assert fleet_db.try_lease("another", "other", "a-dataset", 600) is not None
    assert figures()["engines_held", "org/m"] == 2, "the plan counts engines of fleet.yaml, too"
    clock.forward(601)
    assert figures()["engines_held", "org/m"] == 0
    assert fleet_db.end_request("api/org/m", "batches since b", None)
    assert figures() == {}


def test_an_engine_is_held_for_its_latest_lease_and_not_while_it_boots_or_is_to_end(fleet_db: FleetDatabase) -> None:
    fleet_db.begin_run("next", "api/b", "0", "1")
    lease = ready(fleet_db, "ba-1", dataset="api/a", ttl=600)
    ready(fleet_db, "ba-2", dataset="api/a", ttl=600)
    intended(fleet_db, "ba-3", dataset="api/a", ttl=600)
    assert fleet_db.engines_held() == {"api/a": 2}
    assert fleet_db.drain(lease) and fleet_db.try_lease("ba-1", "next", "api/b", 600) is not None
    assert fleet_db.engines_held() == {"api/a": 1, "api/b": 1}
    assert fleet_db.retire("ba-2", "too many")
    assert fleet_db.engines_held() == {"api/b": 1}
