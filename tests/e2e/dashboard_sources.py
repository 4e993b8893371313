"""What the dashboard looks at: two services over Postgres and Redis, a fleet on simulated providers, and a Prometheus.

All of it listens on loopback. The services speak TLS and ask for keys; Prometheus reads them as
deploy/monitoring/prometheus.yaml says, only oftener, and has the rules of alerts.yaml.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from support.certificates import Authority
from support.fleet_databases import postgres_url
from support.redis_server import RedisServer
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.timing import PATIENCE

from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.requests.callers import Scope
from batch_assets.local_dagster.home import prepare_home
from benchmarks.postgres import postgres, why_not
from e2e.browser import CHROMIUM
from e2e.harness import REPOSITORY, eventually
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.providers.engine_process import free_port
from resources.fleet.resource import GpuFleet

MONITORING = REPOSITORY / "deploy" / "monitoring"
SCRAPE_SECONDS = 2
CHAT_MODEL, BATCH_MODEL = "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct"
UNLUCKY, POISON = "unlucky", "poison"  # prompts that engines fail, and that they refuse
FAULTS = (
    {"kind": "http_500", "match": {"contains": UNLUCKY}},
    {"kind": "too_long", "match": {"contains": POISON}},
)
ENGINES, RESERVE = 4, 2  # each service holds its reserve
SMALL = 6  # requests a minute of the tenant small, whose program asks about once a second: most are refused
CERTIFICATE_LIFE = datetime.timedelta(days=60)


def why_no_dashboard() -> str:
    """What is missing here, or ""."""
    if shutil.which("prometheus") is None:
        return "needs prometheus: apt-get install -y --no-install-recommends prometheus"
    if CHROMIUM is None:
        return "needs chromium: apt-get install -y --no-install-recommends chromium"
    if shutil.which("redis-server") is None:
        return "needs redis-server: apt-get install -y --no-install-recommends redis-server"
    return why_not()


needs_site = pytest.mark.skipif(bool(why_no_dashboard()), reason=why_no_dashboard())


@dataclass
class Service:
    """One `batch-assets serve`."""

    port: int
    folder: Path
    environment: Mapping[str, str]
    authority: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; returns at once."""
        command = [sys.executable, "-m", "batch_assets.cli.main", "serve", "--port", str(self.port)]
        with (self.folder / f"service-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **self.environment}, cwd=REPOSITORY, stdout=log, stderr=log
            )

    def answers(self) -> bool:
        """Whether it is ready."""
        context = ssl.create_default_context(cadata=self.authority)
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/readyz", timeout=5, context=context):
            return True
        return False

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class DashboardSources:
    """`keys`: of the tenants acme and small, and of Prometheus (ops)."""

    services: tuple[Service, Service]
    engines: tuple[SimulatedEngine, ...]
    keys: Mapping[str, str]
    authority: str
    prometheus: str


@contextlib.contextmanager
def dashboard_sources(folder: Path) -> Iterator[DashboardSources]:
    """Everything started; everything ended afterwards."""
    home = folder / "home"
    home.mkdir(mode=0o700)
    authority = Authority()
    certificate, key = authority.issue("service", life=CERTIFICATE_LIFE).write(folder)
    (folder / "authority.pem").write_bytes(authority.pem)
    redis = RedisServer(folder)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(postgres(durable=False))
        records, fleet_url = (stack.enter_context(postgres_url(server.url())) for _ in range(2))
        engines = tuple(stack.enter_context(_engine()) for _ in range(ENGINES))
        stack.callback(redis.kill)
        redis.start()
        _write_settings(home, folder / "defs", engines)
        keys = _keys(records)
        environment = {
            "DAGSTER_HOME": str(home),
            "BATCH_ASSETS_STORE": str(folder / "store"),
            "BATCH_ASSETS_DEFS": str(folder / "defs"),
            "BATCH_ASSETS_API_DB": records,
            "BATCH_ASSETS_FLEET_DB": fleet_url,
            "BATCH_ASSETS_ONLINE_REDIS": redis.url,
            "BATCH_ASSETS_TLS_CERTIFICATE": str(certificate),
            "BATCH_ASSETS_TLS_KEY": str(key),
            "BATCH_ASSETS_CAPACITY_SECONDS": "5",
            "BATCH_ASSETS_FLEET": str(home / "fleet.yaml"),
        }
        pem = authority.pem.decode()
        stack.enter_context(_reaper(home, fleet_url))
        first, second = (Service(free_port(), folder, environment, pem) for _ in range(2))
        for service in (first, second):
            stack.callback(service.kill)
            service.start()
            eventually(service.answers, 60, f"{service.url}/readyz; its log is in {folder}")
        url = stack.enter_context(_prometheus(folder, (first, second), keys["ops"]))
        yield DashboardSources((first, second), engines, keys, pem, url)


def _engine() -> contextlib.AbstractContextManager[SimulatedEngine]:
    words = ["--max-num-seqs", "24", "--output-tokens", "lognormal:48:160", "--weights-ms", "9"]
    return simulated_engine(*words, model=CHAT_MODEL)


def _write_settings(home: Path, defs: Path, engines: tuple[SimulatedEngine, ...]) -> None:
    """Engines of our own for chats; three providers, of which one is dear, for batches."""
    for engine in engines:
        engine.set_faults(*FAULTS)
    standing = [
        {"name": f"lab-{number}", "kind": "endpoint", "url": engine.url, "models": [CHAT_MODEL], "max_num_seqs": 24}
        for number, engine in enumerate(engines, 1)
    ]
    words = ["--output-tokens", "lognormal:96:256", "--max-num-seqs", "24", "--faults", str(home / "faults.json")]
    (home / "faults.json").write_text(json.dumps(FAULTS))
    offers = (("sim-north", 0.8, 2), ("sim-south", 1.1, 2), ("sim-west", 1.9, 4))
    providers = [
        {
            "name": name,
            "boot_seconds": 20,
            "offers": [{"instance_type": f"{name}.l40s", "gpu": "L40S", "price_per_hour": usd, "capacity": most}],
        }
        for name, usd, most in offers
    ]
    simulated = {"clock": 4, "arguments": words, "providers": providers}
    fleet = {"engines": standing, "simulated": simulated, "idle_minutes": 0.5, "max_instances": 5}
    (home / "fleet.yaml").write_text(yaml.safe_dump(fleet))
    (home / "models.yaml").write_text(yaml.safe_dump({"reserve": {CHAT_MODEL: RESERVE}}))
    limits = {"tenants": {"small": {"requests_per_minute": SMALL}, "acme": {"requests_per_minute": 100_000}}}
    (home / "limits.yaml").write_text(yaml.safe_dump(limits))
    dollars = {"interactive": {"input": 0.2, "output": 0.6}}
    (home / "prices.yaml").write_text(yaml.safe_dump({"models": {CHAT_MODEL: dollars}}))
    (defs / "notes").mkdir(parents=True)
    spec = {"name": "notes", "model": BATCH_MODEL, "source": {"grid": {"a": ["b"]}}, "prompt": {"user": "{{ a }}"}}
    (defs / "notes" / "defs.yaml").write_text(
        yaml.safe_dump({"type": "batch_assets.GeneratedDataset", "attributes": spec})
    )


def _keys(records: str) -> dict[str, str]:
    with contextlib.closing(KeyStore(records, time.time)) as store:
        tenants = frozenset(Scope) - {Scope.METRICS_READ}
        scopes = {"acme": tenants, "small": tenants, "ops": frozenset({Scope.METRICS_READ})}
        return {tenant: store.create(tenant, found)[1] for tenant, found in scopes.items()}


@contextlib.contextmanager
def _reaper(home: Path, database: str) -> Iterator[None]:
    """What the sensors `reaper` and `watchdog` do where Dagster runs; at the end nothing rented is left."""
    fleet, over = GpuFleet(database=database, home=str(home), config_path=str(home / "fleet.yaml")), threading.Event()
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(FleetDatabase(database)) as fleet_db:
        patch.setenv("DAGSTER_HOME", str(home))
        prepare_home()
        thread = threading.Thread(target=_sweep, args=(fleet, fleet_db, over), name="reaper")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            fleet.down(fleet_db)


def _sweep(fleet: GpuFleet, fleet_db: FleetDatabase, over: threading.Event) -> None:
    while not over.wait(2.0):
        fleet.sweep(fleet_db)
        for beat in fleet_db.runs():
            if beat.age > 2 * fleet.ttl:
                fleet_db.release_run(beat.run_id)
                fleet_db.declare_dead(beat.run_id)


@contextlib.contextmanager
def _prometheus(folder: Path, services: tuple[Service, ...], key: str) -> Iterator[str]:
    """Its address. deploy/monitoring/prometheus.yaml with our addresses, certificates and times."""
    place = folder / "prometheus"
    place.mkdir()
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"}
    (job,) = config["scrape_configs"]
    job |= {"scheme": "https", "tls_config": {"ca_file": str(folder / "authority.pem")}}
    job["authorization"]["credentials_file"] = str(place / "key")
    job["static_configs"] = [{"targets": [f"127.0.0.1:{service.port}" for service in services]}]
    (place / "key").write_text(key)
    (place / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (place / "alerts.yaml").write_text((MONITORING / "alerts.yaml").read_text())
    port = free_port()
    command = ["prometheus", f"--config.file={place}/prometheus.yaml", f"--storage.tsdb.path={place}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    url = f"http://127.0.0.1:{port}"
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30 * PATIENCE
        while not _is_ready(url):
            assert process.poll() is None and time.monotonic() < deadline, (place / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=2):
        return True
    return False
