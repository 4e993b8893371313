"""TLS from files: new ones are taken as soon as they fit together, bad ones are one clear error."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from support.certificates import Authority, Pair, encrypted, serial_of

from gpu_runner.bounded_http.tls_files import (
    RotatingContext,
    TlsFiles,
    TlsFilesError,
    client_context,
    client_tls,
    server_context,
)
from gpu_runner.client.engine_client import EngineClient, EngineLost, EngineRefused
from gpu_runner.rows import Generation


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_new_files_are_used_when_certificate_and_key_fit(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    clock, one, two = Clock(), authority.issue("one"), authority.issue("two", rsa_key=True, life=timedelta(days=2))
    certificate, key = one.write(tmp_path)
    rotating = RotatingContext(TlsFiles(certificate, key), server_context, clock=clock)
    first, ends_at = rotating.current(), rotating.ends_at

    certificate.write_bytes(two.certificate)  # the key is that of before: a rotation that has come half-way
    clock.now += 1
    assert rotating.current() is first
    clock.now += 1
    with caplog.at_level(logging.ERROR):
        caplog.clear()
        assert rotating.current() is first and not caplog.records, "what is wrong is said once"
    key.write_bytes(two.key)
    assert rotating.current() is first, "files are looked at once a second"
    clock.now += 1
    second = rotating.current()
    assert second is not first and rotating.ends_at != ends_at
    clock.now += 1
    assert rotating.current() is second

    key.unlink()
    clock.now += 1
    assert rotating.current() is second
    one.write(tmp_path)
    clock.now += 1
    assert rotating.current() not in (first, second)


def test_files_behind_a_link_that_is_turned_are_new(tmp_path: Path, authority: Authority) -> None:
    clock = Clock()  # as Kubernetes mounts a secret: a link to a folder, replaced as a whole
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        authority.issue(name).write(tmp_path / name)
    link = tmp_path / "data"
    link.symlink_to("one")
    rotating = RotatingContext(TlsFiles(link / "tls.crt", link / "tls.key"), server_context, clock=clock)
    first = rotating.current()
    turned = tmp_path / "data.new"
    turned.symlink_to("two")
    turned.replace(link)
    clock.now += 1
    assert rotating.current() is not first


Break = Callable[[Path, Path, Authority], object]
BAD: dict[str, tuple[Break, str]] = {
    "no certificate": (lambda c, k, a: c.unlink(), "tls.crt: expected a file that can be read, found: No such file"),
    "no key": (lambda c, k, a: k.unlink(), "tls.key: expected a file that can be read, found: No such file"),
    "a folder": (
        lambda c, k, a: (k.unlink(), k.mkdir()),
        "tls.key: expected a file that can be read, found: no regular",
    ),
    "another key": (
        lambda c, k, a: k.write_bytes(a.issue("other").key),
        "tls.key: expected the private key of .*tls.crt, found one that is not the certificate's",
    ),
    "an encrypted key": (
        lambda c, k, a: k.write_bytes(encrypted(a.issue("other"))),
        "tls.key: expected the private key of .*tls.crt, found one that is not the certificate's, encrypted",
    ),
    "no PEM": (lambda c, k, a: c.write_bytes(b"\x30\x82"), "tls.crt: expected PEM"),
    "a certificate as the key": (
        lambda c, k, a: k.write_bytes(c.read_bytes()),
        "tls.key: expected a private key in PEM",
    ),
    "a key as the certificate": (
        lambda c, k, a: c.write_bytes(k.read_bytes()),
        "tls.crt: expected certificates in PEM",
    ),
    "a damaged certificate": (
        lambda c, k, a: c.write_bytes(c.read_bytes().replace(b"MII", b"???")),
        "tls.crt: expected certificates in PEM",
    ),
    "one that has ended": (
        lambda c, k, a: a.issue("old", life=timedelta(days=-1)).write(c.parent),
        "tls.crt: expected a certificate that is valid, found one that ended",
    ),
    "too much": (lambda c, k, a: c.write_bytes(b"-----BEGIN " * (1 << 19)), "tls.crt: .*more than 4,194,304 bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_error_that_names_the_file_and_no_key(
    tmp_path: Path, authority: Authority, case: str
) -> None:
    certificate, key = authority.issue("server").write(tmp_path)
    change, message = BAD[case]
    change(certificate, key, authority)
    with pytest.raises(TlsFilesError, match=message) as refused:
        server_context(TlsFiles(certificate, key))
    assert "\n" not in str(refused.value) and "PRIVATE" not in str(refused.value)


def test_authorities_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    with pytest.raises(TlsFilesError, match=r"ca\.pem: expected certificates of authorities in PEM"):
        client_context(TlsFiles(ca=tmp_path / "ca.pem"))


class Engine:
    """An engine of https that lets in only who shows a certificate of `clients`."""

    def __init__(self, files: TlsFiles, clients: bytes) -> None:
        def context(files: TlsFiles) -> ssl.SSLContext:
            made = server_context(files)
            made.verify_mode = ssl.CERT_REQUIRED
            made.load_verify_locations(cadata=clients.decode())
            return made

        self._server = RotatingContext(files, context, look_seconds=0.0)
        self.seen: list[int] = []  # serial numbers of clients, by request
        self.url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Engine]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._server.for_handshakes()).start()
            self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    def _note(self, request: web.Request) -> None:
        assert request.transport is not None
        connection = request.transport.get_extra_info("ssl_object")
        self.seen.append(serial_of(connection.getpeercert(binary_form=True)))

    async def _models(self, request: web.Request) -> web.Response:
        self._note(request)
        return web.json_response({"data": [{"id": "m"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        self._note(request)
        answer = {"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}
        return web.json_response(answer)


def files_of(folder: Path, name: str, pair: Pair, ca: bytes | None = None) -> TlsFiles:
    certificate, key = pair.write(folder, name)
    if ca is not None:
        (folder / f"{name}-ca.pem").write_bytes(ca)
    return TlsFiles(certificate, key, folder / f"{name}-ca.pem" if ca is not None else None)


def test_both_ends_of_engine_connections_are_rotated_while_requests_go_on(tmp_path: Path, authority: Authority) -> None:
    async def scenario() -> None:
        servers, clients = authority, Authority("clients")
        pairs = [clients.issue(f"client {number}", rsa_key=number % 2 == 1) for number in range(3)]
        server_files = files_of(tmp_path, "server", servers.issue("server"))
        client_files = files_of(tmp_path, "client", pairs[0], servers.pem)
        client_tls(client_files)._look_seconds = 0.0  # look at each request
        async with Engine(server_files, clients.pem).running() as engine:
            client = EngineClient(engine.url, Generation("completion", "m"), tls=client_files)
            async with client:
                await client.info()

                async def ask() -> None:
                    for _ in range(20):
                        await client.canary()

                for pair in pairs:
                    pair.write(tmp_path, "client")
                    asking = asyncio.gather(*(ask() for _ in range(4)))
                    await asyncio.sleep(0)
                    servers.issue("server again").write(tmp_path, "server")
                    await asking
            assert set(engine.seen) == {pair.serial for pair in pairs}
            assert engine.seen[-1] == pairs[-1].serial

    asyncio.run(scenario())


def test_an_engine_of_another_authority_is_not_asked(tmp_path: Path, authority: Authority) -> None:
    async def scenario() -> None:
        strangers, clients = Authority("strangers"), Authority("clients")
        server = files_of(tmp_path, "server", strangers.issue("server"))
        async with Engine(server, clients.pem).running() as engine:
            files = files_of(tmp_path, "client", clients.issue("client"), authority.pem)
            async with EngineClient(engine.url, Generation("completion", "m"), tls=files) as client:
                with pytest.raises(EngineRefused, match="fails verification"):
                    await client.info()
            assert engine.seen == []

    asyncio.run(scenario())


def test_an_engine_that_wants_a_certificate_refuses_who_shows_none(tmp_path: Path, authority: Authority) -> None:
    async def scenario() -> None:
        server = files_of(tmp_path, "server", authority.issue("server"))
        (tmp_path / "ca.pem").write_bytes(authority.pem)
        async with Engine(server, authority.pem).running() as engine:
            async with EngineClient(
                engine.url, Generation("completion", "m"), tls=TlsFiles(ca=tmp_path / "ca.pem")
            ) as client:
                with pytest.raises((EngineLost, aiohttp.ClientError)):
                    await client.info()
            assert engine.seen == []

    asyncio.run(scenario())
