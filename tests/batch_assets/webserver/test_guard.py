"""The guard in front of Dagster's webserver: what foreign pages, other users and programs can do."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import pwd
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from batch_assets.settings import SettingError
from batch_assets.webserver import guard
from batch_assets.webserver.guard import WebGuard
from batch_assets.webserver.guarded_requests import Access
from batch_assets.webserver.peers import own_connection, peer_uid
from batch_assets.webserver.token import FILE, VARIABLE, cookie_value, web_token

TOKEN = "t" * 64
HOST = "127.0.0.1:3000"
ORIGIN = f"http://{HOST}"
COOKIE = f"batch_assets_3000={cookie_value(TOKEN, 3000)}"
QUERY = "{ version }"
MUTATION = "mutation { reloadWorkspace { __typename } }"
SUBSCRIPTION = "subscription { logs { id } }"
JSON = {"content-type": "application/json"}
BEARER = {"authorization": f"Bearer {TOKEN}"}
UI = {"origin": ORIGIN, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors", "cookie": COOKIE}
REPORT = "/report_asset_materialization/example/rows"


class Webserver:
    """An ASGI app behind the guard that notes what came through, and answers as Dagster's would."""

    def __init__(self, *, own: bool = True, hosts: Sequence[str] = ()) -> None:
        access = Access(3000, TOKEN, cookie_value(TOKEN, 3000), frozenset(hosts))
        self.guard = WebGuard(self._app, access, lambda client, server: own)
        self.reached: list[bytes] = []

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            while (message := await receive())["type"] == "websocket.receive":
                self.reached.append(message["text"].encode())
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.reached.append(body)
        page = scope["method"] == "GET" and scope["path"] in ("/", "/runs")
        kind = b"text/html; charset=utf-8" if page else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": b"{}"})

    def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        *,
        query: str = "",
        body: bytes = b"",
    ) -> tuple[int, list[tuple[str, str]]]:
        """Status and headers of the answer. The Host header is ours unless one is given."""
        pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
        if "host" not in dict(pairs):
            pairs.insert(0, ("host", HOST))
        scope = self._scope("http", path, pairs) | {"method": method, "query_string": query.encode()}
        sent = asyncio.run(self._carry(scope, [{"type": "http.request", "body": body, "more_body": False}]))
        return sent[0]["status"], [(name.decode(), value.decode()) for name, value in sent[0]["headers"]]

    def status(self, *words: Any, **more: Any) -> int:
        return self.ask(*words, **more)[0]

    def post(self, query: Any, headers: Mapping[str, str], **more: Any) -> int:
        return self.status("POST", "/graphql", {**JSON, **headers}, body=json.dumps({"query": query, **more}).encode())

    def connect(self, headers: Mapping[str, str], *texts: str) -> list[str]:
        """What the guard answered to a WebSocket and its messages, by type."""
        messages = [{"type": "websocket.receive", "text": text} for text in texts]
        scope = self._scope("websocket", "/graphql", [("host", HOST), *headers.items()])
        sent = asyncio.run(self._carry(scope, [*messages, {"type": "websocket.disconnect", "code": 1000}]))
        return [message["type"] for message in sent]

    @staticmethod
    def _scope(kind: str, path: str, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
        raw = [(name.encode(), value.encode()) for name, value in pairs]
        ends = {"client": ("127.0.0.1", 50_000), "server": ("127.0.0.1", 3000)}
        return {"type": kind, "path": path, "headers": raw, "query_string": b"", **ends}

    async def _carry(self, scope: dict[str, Any], messages: list[dict[str, Any]]) -> list[Any]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        await self.guard(scope, receive, send)
        return sent


@pytest.fixture
def server() -> Webserver:
    return Webserver()


FOREIGN = {
    "another origin": {"origin": "http://evil.example"},
    "another port of this machine": {"origin": "http://127.0.0.1:8000"},
    "another name of this machine": {"origin": "http://localhost:3000"},
    "the origin null of a sandboxed frame": {"origin": "null"},
    "our origin over https": {"origin": f"https://{HOST}"},
    "an origin that begins like ours": {"origin": f"{ORIGIN}0"},
    "a host name that leads here (DNS rebinding)": {"host": "attacker.example:3000"},
    "a rebound name with its own origin": {"host": "attacker.example:3000", "origin": "http://attacker.example:3000"},
    "our name at another port": {"host": "127.0.0.1:8000"},
    "a name that ends like ours": {"host": "evil.localhost:3000"},
    "no host": {"host": ""},
    "another site, without origin": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    "another port, without origin": {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
    "a frame": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
}


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_page_reaches_nothing_even_with_the_cookie_of_the_ui(server: Webserver, headers: dict[str, str]):
    for path in ("/graphql", "/", "/logs/x", REPORT, "/server_info"):
        assert server.status("GET", path, {"cookie": COOKIE, **headers}, query="query={version}") == 403
    assert server.post(QUERY, {"cookie": COOKIE, **headers}) == 403
    assert server.post(MUTATION, {"cookie": COOKIE, **headers}) == 403
    assert server.status("POST", REPORT, {"cookie": COOKIE, **headers}) == 403
    assert server.status("OPTIONS", "/graphql", {"cookie": COOKIE, **headers}) == 403
    if "host" not in headers:
        assert server.connect({"cookie": COOKIE, **headers}) == ["websocket.close"]
    assert server.reached == []


def test_a_link_from_another_site_opens_a_page_but_no_address_that_answers_with_data(server: Webserver):
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert server.status("GET", "/runs", link) == 200
    for path in ("/graphql", "/logs/a/b.out", "/download_debug/x", "/notebook", "/dagit/notebook"):
        assert server.status("GET", path, link, query="query={version}") == 403
    assert server.status("POST", "/runs", {**link, **JSON}) == 403


CHANGES = {
    "a mutation": MUTATION,
    "a mutation among queries": f"query a {QUERY} mutation b {{ reloadWorkspace {{ __typename }} }}",
    "a mutation behind comments": f"# query\n,,,\ufeff{MUTATION}",
    "a subscription": SUBSCRIPTION,
}


@pytest.mark.parametrize("document", CHANGES.values(), ids=CHANGES)
def test_nothing_is_changed_by_get_even_with_the_token(server: Webserver, document: str):
    from urllib.parse import urlencode

    for fields in (
        [("query", document)],
        [("query", QUERY), ("query", document)],
        [("query", document), ("query", QUERY)],
        [("query", document), ("operationName", "a")],
    ):
        for path in ("/graphql", "/graphql/"):
            assert server.status("GET", path, {**UI, **BEARER}, query=urlencode(fields)) == 405
    assert server.reached == []
    assert server.status("GET", "/graphql", UI, query=urlencode({"query": QUERY})) == 200


@pytest.mark.parametrize("document", CHANGES.values(), ids=CHANGES)
def test_a_change_by_post_needs_the_token_or_the_cookie_of_the_ui(server: Webserver, document: str):
    assert server.post(document, {}) == 403
    assert server.post(document, {}, operationName="a") == 403
    assert server.post(document, {"authorization": "Bearer " + "x" * 64}) == 403
    assert server.post(document, {"authorization": "Bearer " + cookie_value(TOKEN, 3000)}) == 403
    assert server.post(document, {"cookie": f"batch_assets_3000={TOKEN}"}) == 403
    assert server.post(document, {"cookie": f"batch_assets_3001={cookie_value(TOKEN, 3001)}"}) == 403
    assert server.reached == []
    assert server.post(document, UI) == 200
    assert server.post(document, {"cookie": f"batch_assets_3000=set-by-another-port; a=b; {COOKIE}"}) == 200
    assert server.post(document, BEARER) == 200


def test_a_query_by_post_needs_no_token(server: Webserver):
    assert server.post(QUERY, {}) == 200
    assert json.loads(server.reached[0]) == {"query": QUERY}


SIMPLE = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/graphql"]
SIMPLE += ["text/plain; charset=application/json", "text/plain;application/json", "application/jsonp", ""]


@pytest.mark.parametrize("kind", SIMPLE)
def test_what_a_form_can_send_is_refused_also_in_the_address(server: Webserver, kind: str):
    headers = {**UI, **BEARER, **({"content-type": kind} if kind else {})}
    body = json.dumps({"query": QUERY}).encode()
    assert server.status("POST", "/graphql", headers, body=body) == 415
    assert server.status("POST", "/graphql", headers, query="query=" + MUTATION) == 415
    assert server.status("POST", REPORT, headers, body=b"x") == (200 if kind == "" else 415)


def test_reports_of_assets_need_the_token_with_and_without_a_body(server: Webserver):
    for path in (REPORT, "/report_asset_check/x", "/report_asset_observation/x", "/anything/else"):
        assert server.status("POST", path) == 403
        assert server.status("POST", path, JSON, body=b"{}") == 403
        assert server.reached == []
    assert server.status("POST", REPORT, BEARER) == 200


def test_other_methods_are_refused(server: Webserver):
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "post"):
        assert server.status(method, "/graphql", {**UI, **BEARER, **JSON}) == 405
    assert server.reached == []


def test_a_header_that_decides_is_given_once(server: Webserver):
    for name, value in {"host": "evil.example", "origin": "null", **JSON, **BEARER}.items():
        assert server.status("GET", "/", [("host", HOST), (name, value), (name, value)]) == 400


HOSTILE = {
    "no JSON": b"{",
    "a list of requests": b'[{"query": "{ version }"}]',
    "no query": b"{}",
    "a query that is no text": b'{"query": {"a": 1}}',
    "no document": b'{"query": "mutation {"}',
    "nesting of the JSON": b'{"query":' + b"[" * 100_000,
    "nesting of the document": json.dumps({"query": "{a" * 5_000 + "}" * 5_000}).encode(),
    "a document without end": json.dumps({"query": "{" + "a " * 30_000 + "}"}).encode(),
    "no UTF-8": b'{"query": "\xff"}',
}


@pytest.mark.slow
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_body_that_is_no_graphql_request_is_answered_400(server: Webserver, body: bytes):
    assert server.status("POST", "/graphql", {**UI, **JSON}, body=body) == 400
    assert server.reached == []


def test_a_body_is_read_up_to_a_limit(server: Webserver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard, "MOST_BODY_BYTES", 1000)
    body = json.dumps({"query": QUERY, "variables": {"x": "y" * 1000}}).encode()
    assert server.status("POST", "/graphql", {**UI, **JSON}, body=body) == 413
    for length in ("1001", "9" * 5000, "-1", "many"):
        assert server.status("POST", "/graphql", {**UI, **JSON, "content-length": length}, body=b"") == 413
    assert server.reached == []


def start(document: str) -> str:
    return json.dumps({"id": "1", "type": "start", "payload": {"query": document}})


def test_a_websocket_of_the_ui_follows_what_happens_and_changes_nothing(server: Webserver):
    assert server.connect(UI, json.dumps({"type": "connection_init"}), start(SUBSCRIPTION)) == ["websocket.accept"]
    assert len(server.reached) == 2
    for message in (start(MUTATION), start(CHANGES["a mutation among queries"]), start("{"), "[]", "[" * 100_000):
        assert server.connect({**UI, **BEARER}, message, start(SUBSCRIPTION)) == ["websocket.accept", "websocket.close"]
    assert len(server.reached) == 2


def test_a_websocket_needs_the_cookie_or_the_token(server: Webserver):
    assert server.connect({"origin": ORIGIN}) == ["websocket.close"]
    assert server.connect({}) == ["websocket.close"]
    assert server.connect(BEARER) == ["websocket.accept"]


def cookies(answer: tuple[int, list[tuple[str, str]]]) -> list[str]:
    return [value for name, value in answer[1] if name == "set-cookie"]


def test_a_page_brings_the_cookie_and_nothing_else_does(server: Webserver):
    (given,) = cookies(server.ask("GET", "/"))
    assert given == f"{COOKIE}; Path=/; HttpOnly; SameSite=Strict"
    assert TOKEN not in given
    assert cookies(server.ask("GET", "/", {"cookie": COOKIE})) == []
    assert cookies(server.ask("GET", "/asset.js")) == cookies(server.ask("GET", "/server_info")) == []
    assert cookies(server.ask("GET", "/", FOREIGN["a frame"])) == []


def test_no_page_of_another_origin_frames_the_ui(server: Webserver):
    for answer in (server.ask("GET", "/"), server.ask("GET", "/graphql", FOREIGN["a frame"])):
        assert ("x-frame-options", "SAMEORIGIN") in answer[1]
        assert ("content-security-policy", "frame-ancestors 'self'") in answer[1]
        assert not [name for name, _ in answer[1] if name.startswith("access-control-")]


def test_another_user_of_the_machine_gets_the_health_and_no_page(server: Webserver):
    server = Webserver(own=False)
    assert server.status("GET", "/server_info") == 200
    for headers in ({}, UI, {"cookie": COOKIE}):
        answer = server.ask("GET", "/", headers)
        assert answer[0] == 403 and cookies(answer) == []
        assert server.post(QUERY, headers) == server.post(MUTATION, headers) == 403
        assert server.connect(headers) == ["websocket.close"]
    assert server.post(MUTATION, BEARER) == 200
    assert cookies(server.ask("GET", "/", BEARER)) == []


def test_a_proxy_is_let_in_under_its_own_name_with_the_token(server: Webserver):
    server = Webserver(own=False, hosts=["data.example.com"])
    proxied = {"host": "data.example.com", "origin": "https://data.example.com", "sec-fetch-site": "same-origin"}
    assert server.post(MUTATION, {**proxied, **BEARER}) == 200
    assert server.post(MUTATION, proxied) == 403
    assert server.post(MUTATION, {**proxied, **BEARER, "origin": "https://evil.example"}) == 403


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_the_kernel_says_who_has_connected():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()) as client:
            ends = client.getsockname(), listening.getsockname()
            assert peer_uid(*ends) == os.getuid()
            accepted, _ = listening.accept()
        # Its process has closed it: the kernel now says root, which would open the door to everybody.
        assert peer_uid(*ends) is None
        accepted.close()


@pytest.mark.skipif(os.getuid() != 0 or not Path("/proc/net/tcp").exists(), reason="needs root, to be another user")
def test_a_connection_of_another_user_is_theirs_unless_they_are_of_our_group(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        os.seteuid(65534)
        try:
            stranger = socket.create_connection(listening.getsockname())
        finally:
            os.seteuid(0)
        with stranger:
            assert peer_uid(stranger.getsockname(), listening.getsockname()) == 65534
            assert not own_connection(stranger.getsockname(), listening.getsockname())
            monkeypatch.setenv("BATCH_ASSETS_GROUP", grp.getgrgid(pwd.getpwuid(65534).pw_gid).gr_name)
            assert own_connection(stranger.getsockname(), listening.getsockname())
            monkeypatch.setenv("BATCH_ASSETS_GROUP", "root")
            assert not own_connection(stranger.getsockname(), listening.getsockname())


def test_the_token_is_read_by_its_owner_only_and_stays(tmp_path: Path):
    token = web_token(tmp_path)
    assert web_token(tmp_path) == token and len(token) == 64
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("text", ["", "short", "x" * 64])
def test_a_token_that_others_could_read_or_that_is_damaged_is_replaced(tmp_path: Path, text: str):
    path = tmp_path / FILE
    path.write_text(text)
    path.chmod(0o644)
    token = web_token(tmp_path)
    assert token != text and len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_member_of_the_group_reads_the_token_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch):
    name = grp.getgrgid(pwd.getpwuid(65534).pw_gid).gr_name
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        home.chmod(0o755)
        alone = web_token(home)

        def of_another_user() -> str:
            words = ["cat", str(home / FILE)]
            found = subprocess.run(words, user=65534, group=65534, extra_groups=[], capture_output=True, text=True)
            return found.stdout

        assert of_another_user() == ""
        monkeypatch.setenv("BATCH_ASSETS_GROUP", name)
        assert web_token(home) == alone  # and is theirs from now on
        assert of_another_user().strip() == alone
        (home / FILE).unlink()
        made = web_token(home)
        assert made != alone and of_another_user().strip() == made
        state = (home / FILE).stat()
        assert (state.st_mode & 0o777, state.st_gid) == (0o640, grp.getgrnam(name).gr_gid)


def test_a_token_that_the_group_could_write_or_another_group_could_read_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BATCH_ASSETS_GROUP", grp.getgrgid(os.getegid()).gr_name)
    token = web_token(tmp_path)
    (tmp_path / FILE).chmod(0o660)
    assert web_token(tmp_path) != token
    token = web_token(tmp_path)
    monkeypatch.delenv("BATCH_ASSETS_GROUP")
    assert web_token(tmp_path) != token
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_token_of_the_environment_takes_the_place_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "a1" * 16)
    assert web_token(tmp_path) == "a1" * 16
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("token", ["short", "with a blank and more than 32 characters", "é" * 40])
def test_a_token_that_can_be_guessed_is_refused_without_showing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv(VARIABLE, token)
    with pytest.raises(SettingError, match="expected at least 32 letters and digits") as refused:
        web_token(tmp_path)
    assert token not in str(refused.value)


def test_who_connects_from_another_container_needs_the_token() -> None:
    """Its end of the connection is in no table of this kernel's namespace."""
    assert not own_connection(("192.0.2.7", 40000), ("192.0.2.8", 3000))
