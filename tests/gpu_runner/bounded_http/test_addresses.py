"""Addresses of engines: secrets in them, addresses that no engine has, and whom a tag and a key may name."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dataset_project import MODEL, dataset_project
from typer.testing import CliRunner

from batch_assets.cli.main import app
from batch_assets.local_dagster.dagster_client import DagsterClient, LaunchError
from batch_assets.local_dagster.home import StackAddress
from batch_assets.spec.errors import SpecError
from batch_assets.spec.models import load_spec
from batch_assets.tags import ENDPOINT_TAG, RANGE_END_TAG, RANGE_START_TAG
from batch_assets.webserver import token as web_token
from gpu_runner.bounded_http import addresses
from gpu_runner.bounded_http.addresses import AddressRefused, connect, direct, engine_url, refuse
from gpu_runner.client.engine_client import EngineClient, EngineRefused
from gpu_runner.providers.engine_process import answers, served_length, wait_reachable
from gpu_runner.rows import Generation
from resources import endpoints
from resources.endpoints import FILE, EndpointsError, allow, allowed
from resources.fleet.fleet_config import FleetConfig, FleetConfigError
from resources.objects.opening import StoreError, open_objects

SECRET = "hunter2-secret"
WITH_SECRETS = [
    f"http://user:{SECRET}@host:8000",
    f"http://{SECRET}@host:8000",
    f"http://:{SECRET}@host",
    f"https://host:8000/v1?api_key={SECRET}",
    f"https://host:8000/v1#{SECRET}",
    f"https://host?{SECRET}",
    f"HTTP://User:{SECRET}@host",
    f"http:/user:{SECRET}@host",
    f"//user:{SECRET}@host",
    f"user:{SECRET}@host:8000",
    f"ftp://user:{SECRET}@host",
    f"http://host:{SECRET}/",
    f"http://[::1{SECRET}",
    f"http://host:8000/ {SECRET}",
    f"http://host\\@{SECRET}",
    f"http://ho\nst/{SECRET}",
    f"http://host\t?{SECRET}",
    f"http://:8000?{SECRET}",
]


DOCUMENTS = ["engines:\n  - {name: a, kind: endpoint, url: %s}", "allowed_endpoints: [%s]", "url: %s", "engines: %s"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("BATCH_ASSETS_ENDPOINT", "BATCH_ASSETS_API_KEY", "BATCH_ASSETS_FLEET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("text", WITH_SECRETS)
def test_a_secret_in_an_address_is_refused_and_never_echoed(home: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    with pytest.raises(ValueError, match="expected") as raised:
        engine_url(text)
    said = [str(raised.value), repr(raised.value.__cause__)]
    with pytest.raises(ValueError):
        allow(home, text, None)
    for document in DOCUMENTS:
        (home / "fleet.yaml").write_text(document % json.dumps(text))
        with pytest.raises(FleetConfigError) as wrong:
            FleetConfig.load(home / "fleet.yaml")
        said.append(str(wrong.value))
    for tag, environment in ((text, ""), ("http://127.0.0.1:1", text)):
        monkeypatch.setenv("BATCH_ASSETS_ENDPOINT", environment)
        with pytest.raises(FleetConfigError) as wrong:
            FleetConfig.load(home / "none.yaml", home).engines_for(MODEL, tag)
        said.append(str(wrong.value))
    assert not [words for words in said if SECRET in words]
    assert not [path.name for path in home.iterdir() if path.name.startswith(FILE) and SECRET in path.read_text()]


@pytest.mark.parametrize("text", [WITH_SECRETS[0], WITH_SECRETS[3]])
def test_the_command_line_refuses_secrets_in_addresses(home: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    for arguments, environment in ((["--endpoint", text], ""), ([], text)):
        monkeypatch.setenv("BATCH_ASSETS_ENDPOINT", environment)
        found = CliRunner().invoke(app, ["run", "example", *arguments])
        assert found.exit_code == 2
        assert "a key belongs in the environment" in found.output.replace("\n", " ")
        assert SECRET not in found.output
    monkeypatch.setenv("BATCH_ASSETS_ENDPOINT", text)
    found = CliRunner().invoke(app, ["demo"])
    assert (found.exit_code, SECRET in found.output) == (2, False)


def test_keys_that_fleet_yaml_does_not_know_show_no_values(tmp_path: Path):
    file = tmp_path / "fleet.yaml"
    file.write_text(f"engines:\n  - {{name: a, kind: endpoint, url: 'http://h', api_key: {SECRET}}}\n")
    with pytest.raises(
        FleetConfigError, match=r"api_key: expected a known key, found 'api_key'\. .*api_key_env"
    ) as raised:
        FleetConfig.load(file)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "root",
    [
        f"s3://key:{SECRET}@bucket/prefix",
        f"s3://key:{SECRET}/x@bucket/prefix",
        f"s3://{SECRET}@bucket",
        f"s3://bucket/prefix?secret={SECRET}",
        f"s3://bucket/prefix#{SECRET}",
        f"https://user:{SECRET}@host/x",
        f"s3://[{SECRET}",
    ],
)
def test_secrets_in_the_address_of_the_store_are_refused_and_never_echoed(root: str):
    with pytest.raises(StoreError, match="expected") as raised:
        open_objects(root)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "path",
    [
        f"s3://key:{SECRET}@bucket/x.csv",
        f"s3://key:{SECRET}/x@bucket/x.csv",
        f"S3://{SECRET}@bucket/x.csv",
        f"https://user:{SECRET}@host/x.csv",
        f"https://host/x.csv?token={SECRET}",
        f"hf://datasets/x#{SECRET}",
    ],
)
def test_secrets_in_the_path_of_a_source_are_refused_and_never_echoed(path: str):
    spec = {"name": "d", "source": {"path": path}, "prompt": {"user": "x"}, "model": MODEL}
    with pytest.raises(
        SpecError,
        match=r"source\.path: expected (a path or address without user|a local path|hf://datasets/OWNER/NAME/FILE)",
    ) as raised:
        load_spec(spec, "defs.yaml")
    assert SECRET not in str(raised.value)


def test_wildcards_in_s3_keys_are_no_secrets():
    spec = {"name": "d", "source": {"path": "s3://bucket/a@b/part-?.csv"}, "prompt": {"user": "x"}, "model": MODEL}
    assert load_spec(spec, "defs.yaml").source.path == "s3://bucket/a@b/part-?.csv"


def test_secrets_in_the_address_of_the_s3_server_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:9000")
    with pytest.raises(StoreError, match="AWS_ENDPOINT_URL: expected an address without user") as raised:
        open_objects("s3://bucket/prefix").get("x")
    assert SECRET not in str(raised.value)


def test_a_database_address_that_cannot_be_read_is_not_shown():
    from gpu_runner.fleet_database.database import FleetDatabase

    for url in (f"postgresql://u:p@ss:{SECRET}/db", f"{SECRET}", f"nosuch://u:{SECRET}@host/db"):
        with pytest.raises(ValueError, match="SQLAlchemy URL") as raised:
            FleetDatabase(url)
        assert SECRET not in str(raised.value) and raised.value.__suppress_context__


def test_the_ui_shows_the_name_of_the_variable_and_not_the_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from batch_assets.definitions import platform

    monkeypatch.setenv("BATCH_ASSETS_FLEET_DB", f"postgresql://u:{SECRET}@host/db")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    fleet = (platform().resources or {})["fleet"]
    assert SECRET not in str(fleet) and SECRET not in repr(fleet)


@pytest.mark.parametrize(
    ("given", "one_spelling"),
    [
        ("http://LOCALHOST:8000/", "http://localhost:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://host:443/v1/", "https://host"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("https://host/base/v1", "https://host/base"),
    ],
)
def test_an_address_has_one_spelling(given: str, one_spelling: str):
    assert engine_url(given) == one_spelling


REFUSED = ["0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.0.1", "224.0.0.1", "239.255.255.250", "255.255.255.255"]
REFUSED += ["240.0.0.1", "100.100.100.200", "168.63.129.16", "::", "fe80::1", "fe80::1%eth0", "ff02::1"]
REFUSED += ["fd00:ec2::254", "fd20:ce::254", "::ffff:169.254.169.254", "::ffff:0.0.0.0", "64:ff9b::a9fe:a9fe"]
REFUSED += ["2002:a9fe:a9fe::", "::169.254.169.254"]


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_no_engine_has_is_refused(address: str):
    with pytest.raises(AddressRefused):
        refuse(address)
    literal = f"[{address}]" if ":" in address else address
    with pytest.raises(ValueError, match="never connected to"):
        engine_url(f"http://{literal}:80")


def test_addresses_of_networks_that_engines_are_in_are_taken():
    for address in ("127.0.0.1", "::1", "10.0.0.5", "192.168.1.1", "100.64.0.1", "8.8.8.8", "fd00::5", "2001:4860::8"):
        refuse(address)


# Names and spellings that lead to a refused address only once they are resolved.
DISGUISED = ["http://2852039166", "http://0xa9fea9fe", "http://169.254.43518", "http://0", "http://metadata.test"]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Connections that were begun; the name metadata.test leads to the metadata service, as an attacker's may."""
    real, begun = socket.getaddrinfo, []
    real_connect = socket.socket.connect

    def resolve(host: Any, *words: Any, **more: Any) -> Any:
        return real("169.254.169.254" if host in ("metadata.test", b"metadata.test") else host, *words, **more)

    def begin(self: socket.socket, address: Any) -> Any:
        begun.append(address)
        return real_connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(addresses.socket, "create_connection", lambda *words, **more: begun.append(words))
    monkeypatch.setattr(socket.socket, "connect", begin)
    return begun


@pytest.mark.parametrize("url", DISGUISED)
def test_a_name_that_leads_to_a_refused_address_is_refused_where_it_is_connected_to(resolver: list[Any], url: str):
    with pytest.raises(AddressRefused):
        wait_reachable(url, 60)
    with pytest.raises(AddressRefused):
        connect(url.removeprefix("http://"), 80, 1)

    async def ask() -> None:
        async with EngineClient(url, Generation("chat", MODEL, {}), api_key=SECRET) as client:
            await client.info()

    with pytest.raises(EngineRefused, match=r"never connected to|check the address"):  # aiohttp takes no numbers
        asyncio.run(ask())
    assert resolver == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("url", DISGUISED)
def test_our_small_requests_never_go_to_a_refused_address(resolver: list[Any], url: str, scheme: str):
    address = url.replace("http:", f"{scheme}:")
    assert not answers(address)
    assert served_length(address) is None
    with pytest.raises(urllib.error.URLError) as raised:
        direct.open(address, timeout=1)
    assert isinstance(raised.value.reason, AddressRefused)
    assert resolver == []


@contextlib.contextmanager
def recording(
    status: int, headers: dict[str, str], tls: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A server that answers everything alike; its address, and (path, authorization) of what arrived."""
    arrived: list[tuple[str, str | None]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            arrived.append((self.path, self.headers.get("Authorization")))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", arrived
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def rebinding(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name engine.test leads to loopback at the first look-up and to a metadata service at each later one."""
    real, asked = socket.getaddrinfo, []

    def resolve(host: Any, *words: Any, **more: Any) -> Any:
        if host == "engine.test":
            asked.append(host)
            host = "127.0.0.1" if len(asked) == 1 else "169.254.169.254"
        return real(host, *words, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


def test_a_name_is_looked_up_once_for_a_request(rebinding: list[str]):
    with recording(200, {}) as (url, arrived):
        assert answers(url.replace("127.0.0.1", "engine.test"))
    assert [path for path, _ in arrived] == ["/health"] and len(rebinding) == 1


OPENSSL = shutil.which("openssl")


@pytest.mark.slow
@pytest.mark.skipif(OPENSSL is None, reason="needs openssl, to make a certificate")
@pytest.mark.parametrize("name", ["engine.test", "other.test"])
def test_the_certificate_is_that_of_the_name_though_an_address_is_connected_to(
    rebinding: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    words = [OPENSSL or "", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "certificate")]
    subprocess.run([*words, "-addext", f"subjectAltName=DNS:{name}", *files], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    with recording(200, {}, context) as (url, arrived):
        assert answers(url.replace("http://127.0.0.1", "https://engine.test")) is (name == "engine.test")
    assert len(arrived) == (name == "engine.test") and len(rebinding) == 1


def test_redirects_are_never_followed():
    with recording(200, {}) as (other, arrived), recording(307, {"Location": f"{other}/health"}) as (url, _):
        assert not answers(url)
        assert served_length(url) is None
        with pytest.raises(OSError):
            direct.open(url, timeout=5)

        async def ask() -> None:
            async with EngineClient(url, Generation("chat", MODEL, {}), api_key=SECRET) as client:
                with contextlib.suppress(Exception):
                    await client.info()
                with contextlib.suppress(Exception):
                    await client.generate(b"{}")

        asyncio.run(ask())
        assert arrived == []


def engine_at(home: Path, url: str) -> tuple[str | None, str | None]:
    """Address and variable of the key of the engine that a run with this tag asks."""
    (engine,) = FleetConfig.load(home / "fleet.yaml", home).engines_for(MODEL, url)
    return engine.url, engine.api_key_env


def test_a_tag_names_only_addresses_that_somebody_has_allowed(home: Path, monkeypatch: pytest.MonkeyPatch):
    (home / "fleet.yaml").write_text(
        "engines: [{name: lab, kind: endpoint, url: 'http://10.0.0.5:8000/v1', api_key_env: LAB_KEY}]\n"
        "allowed_endpoints: ['http://10.0.0.6:8000']\n"
    )
    monkeypatch.setenv("BATCH_ASSETS_API_KEY", SECRET)
    with pytest.raises(FleetConfigError, match=r"tag batch/endpoint: expected an address .* nothing was sent"):
        engine_at(home, "http://10.0.0.7:8000")
    assert engine_at(home, "http://10.0.0.5:8000/") == ("http://10.0.0.5:8000/v1", "LAB_KEY")
    assert engine_at(home, "http://10.0.0.6:8000/v1") == ("http://10.0.0.6:8000", None)
    monkeypatch.setenv("BATCH_ASSETS_ENDPOINT", "http://10.0.0.7:8000/v1")
    assert engine_at(home, "http://10.0.0.7:8000") == ("http://10.0.0.7:8000", "BATCH_ASSETS_API_KEY")
    for other in ("https://10.0.0.7:8000", "http://10.0.0.7:8001", "http://10.0.0.7", "http://10.0.0.7:8000/x"):
        with pytest.raises(FleetConfigError):
            engine_at(home, other)


def test_the_key_goes_only_to_the_address_it_was_given_for(home: Path, monkeypatch: pytest.MonkeyPatch):
    with_key, without = "http://10.0.0.7:8000", "http://10.0.0.8:8000"
    allow(home, with_key, SECRET)
    allow(home, without, None)
    monkeypatch.setenv("BATCH_ASSETS_API_KEY", SECRET)
    assert engine_at(home, with_key) == (with_key, "BATCH_ASSETS_API_KEY")
    assert engine_at(home, without) == (without, None)
    for other in ("another key", ""):
        monkeypatch.setenv("BATCH_ASSETS_API_KEY", other)
        with pytest.raises(FleetConfigError, match="expected the key that was given with --endpoint"):
            engine_at(home, with_key)
    allow(home, with_key, None)
    assert engine_at(home, with_key) == (with_key, None)


def test_what_was_allowed_is_kept_without_the_key_for_its_owner_only(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoints, "MOST", 10)
    for number in range(12):
        allow(home, f"http://10.0.0.7:{8000 + number}", None)
    for number in range(20):
        allow(home, "http://10.0.0.7:8011", f"{SECRET}-{number}")
    file = home / FILE
    assert SECRET not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert allowed(home, "http://10.0.0.7:8000") is None
    found = allowed(home, "http://10.0.0.7:8011")
    assert found is not None and found.takes(f"{SECRET}-19") and not found.takes(f"{SECRET}-0")
    file.write_text("{")
    with pytest.raises(EndpointsError, match="delete it"):
        allowed(home, "http://10.0.0.7:8011")


@pytest.mark.slow
def test_a_run_with_a_foreign_address_in_its_tag_fails_with_one_error_and_sends_nothing(home: Path):
    with recording(200, {}) as (url, arrived), dataset_project(home) as site:
        site.source(["why?"] * 5)
        tags = {ENDPOINT_TAG: url}
        assert not site.materialize("prompts", tags=tags).success
        assert "tag batch/endpoint: expected an address" in site.reason()
        assert site.store.current_snapshot() is None
        assert site.materialize("prompts").success
        (batch,) = site.store.entries(site.manifest().snapshot)
        tags |= {RANGE_START_TAG: batch.key, RANGE_END_TAG: batch.key}
        assert not site.materialize("rows", tags=tags).success
        assert "tag batch/endpoint: expected an address" in site.reason()
        assert url not in site.reason()
        assert arrived == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Dagster's use of gql
def test_our_token_goes_to_dagster_also_where_netrc_names_loopback(home: Path, monkeypatch: pytest.MonkeyPatch):
    (home / "netrc").write_text("machine 127.0.0.1 login me password hunter2\nmachine localhost login me password x\n")
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    with recording(200, {}) as (url, arrived):
        client = DagsterClient(StackAddress(url, int(url.rpartition(":")[2]), 1))
        client.terminate(["a run"])
        with pytest.raises(LaunchError):
            client.launch("a_job", {}, {})
    assert [authorization for _, authorization in arrived] == [web_token.headers(home)["Authorization"]] * 2
