"""The service with TLS: certificates are rotated under load, no request fails, and bad files end the start."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import httpx
import pytest
import uvicorn
from support.certificates import Authority, serial_of
from support.front_doors import front_door_alone

from batch_assets.api import server
from batch_assets.api.settings import TLS_CERTIFICATE, TLS_KEY, ApiSettings, api_settings
from batch_assets.settings import SettingError
from gpu_runner.bounded_http.tls_files import TlsFiles, TlsFilesError
from resources.fleet.engine_tls import CA, CERTIFICATE, KEY, EngineTlsError, tls_of_environment
from resources.fleet.fleet_config import FleetConfig, FleetConfigError

CONNECTIONS, REQUESTS = 4, 6
HOST = {"Host": "127.0.0.1:0"}  # the port of the settings: the kernel chooses another


def settings(folder: Path, tls: TlsFiles) -> ApiSettings:
    return ApiSettings(folder, f"{folder}/store", f"sqlite:///{folder}/api.db", port=0, tls=tls)


@contextlib.asynccontextmanager
async def served(found: ApiSettings) -> AsyncIterator[str]:
    """The service on a port of loopback, in this loop, as its process would serve it."""
    service = front_door_alone(found)
    running = uvicorn.Server(server.server_config(service, found, look_seconds=0.0))
    task = asyncio.create_task(running._serve())  # `serve` would take the signals of this process
    try:
        while not running.started:
            await asyncio.sleep(0.01)
            assert not task.done()
        yield f"https://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        await task


async def asked(url: str, context: ssl.SSLContext, seen: set[int]) -> None:
    """Requests on new connections, each of which shows its certificate."""
    for _ in range(REQUESTS):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="127.0.0.1")
        seen.add(serial_of(writer.get_extra_info("ssl_object").getpeercert(binary_form=True)))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:0\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()


async def asked_on_one(url: str, context: ssl.SSLContext) -> None:
    async with aiohttp.ClientSession(headers=HOST) as session:
        for _ in range(REQUESTS):
            async with session.get(f"{url}/healthz", ssl=context) as answer:
                assert answer.status == 200


@pytest.mark.slow
def test_the_certificate_is_rotated_under_load_and_no_request_fails(tmp_path: Path) -> None:
    authority = Authority()
    pairs = [authority.issue(f"service {number}", rsa_key=number % 2 == 1) for number in range(4)]
    certificate, key = pairs[0].write(tmp_path)
    context = ssl.create_default_context(cadata=authority.pem.decode())

    async def scenario() -> None:
        seen: set[int] = set()
        async with served(settings(tmp_path, TlsFiles(certificate, key))) as url:
            for pair in pairs:
                load = [asked(url, context, seen) for _ in range(CONNECTIONS)]
                load += [asked_on_one(url, context) for _ in range(CONNECTIONS)]
                asking = asyncio.gather(*load)
                await asyncio.sleep(0)
                certificate.write_bytes(pair.certificate)  # between the two, they do not fit together
                await asyncio.sleep(0.01)
                key.write_bytes(pair.key)
                await asking
                last: set[int] = set()
                await asked(url, context, last)
                assert last == {pair.serial}
        assert seen == {pair.serial for pair in pairs}

    asyncio.run(scenario())


def test_plain_http_gets_no_answer_from_a_port_with_tls(tmp_path: Path) -> None:
    certificate, key = Authority().issue("service").write(tmp_path)

    async def scenario() -> None:
        async with served(settings(tmp_path, TlsFiles(certificate, key))) as url, httpx.AsyncClient() as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(url.replace("https", "http") + "/healthz")

    asyncio.run(scenario())


def test_bad_files_end_the_start_with_their_name(tmp_path: Path) -> None:
    found = settings(tmp_path, TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key"))
    with pytest.raises(TlsFilesError, match=r"tls\.(crt|key): expected a file that can be read"):
        server.server_config(front_door_alone(found), found)


def test_engines_certificates_that_cannot_be_used_end_the_start_also_where_the_fleet_has_the_engines(
    tmp_path: Path,
) -> None:
    found = ApiSettings(
        tmp_path, "store", f"sqlite:///{tmp_path}/api.db", engine_tls=TlsFiles(ca=tmp_path / "no-such-ca")
    )
    with pytest.raises(TlsFilesError, match="no-such-ca: expected a file that can be read"):
        server.server_config(front_door_alone(found), found)


def test_certificate_and_key_are_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    assert api_settings().tls is None
    monkeypatch.setenv(TLS_CERTIFICATE, "a.crt")
    with pytest.raises(SettingError, match=f"{TLS_KEY}: expected a file"):
        api_settings()
    monkeypatch.setenv(TLS_KEY, "a.key")
    assert api_settings().tls == TlsFiles(Path("a.crt"), Path("a.key"))


def test_the_engines_certificates_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tls_of_environment() is None
    monkeypatch.setenv(CA, "ca.pem")
    assert tls_of_environment() == TlsFiles(ca=Path("ca.pem"))
    monkeypatch.setenv(KEY, "a.key")
    with pytest.raises(EngineTlsError, match=f"{CERTIFICATE}: expected a file"):
        tls_of_environment()
    monkeypatch.setenv(CERTIFICATE, "a.crt")
    assert tls_of_environment() == TlsFiles(Path("a.crt"), Path("a.key"), Path("ca.pem"))


def fleet_file(folder: Path, engine: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(f"engines:\n  - {engine}\n")
    return path


def test_an_engine_of_fleet_yaml_has_certificates_beside_the_file(tmp_path: Path) -> None:
    path = fleet_file(
        tmp_path,
        "{name: a, kind: endpoint, url: 'https://gpu:8000', tls: {ca: ca.pem, certificate: /etc/a.crt, key: a.key}}",
    )
    (engine,) = FleetConfig.load(path).engines
    assert engine.tls_files == TlsFiles(Path("/etc/a.crt"), tmp_path / "a.key", tmp_path / "ca.pem")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("{name: a, kind: endpoint, url: 'http://gpu:8000', tls: {ca: ca.pem}}", "tls: expected for kind endpoint"),
        ("{name: a, kind: simulated, tls: {ca: ca.pem}}", "tls: expected for kind endpoint"),
        ("{name: a, kind: endpoint, url: 'https://g', tls: {key: a.key}}", "certificate, key: expected both or none"),
        ("{name: a, kind: endpoint, url: 'https://g', tls: {cert: a.key}}", "tls.cert"),
    ],
)
def test_certificates_that_cannot_be_are_refused(tmp_path: Path, engine: str, message: str) -> None:
    with pytest.raises(FleetConfigError, match=message):
        FleetConfig.load(fleet_file(tmp_path, engine))
