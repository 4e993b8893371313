"""A hostile web page in a real browser, beside a webserver of ours: nothing of what it tries reaches Dagster."""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from batch_assets.local_dagster.home import ensure_storage, prepare_home
from e2e.browser import ARGUMENTS, CHROMIUM, needs_chromium
from e2e.harness import eventually
from gpu_runner.bounded_http.addresses import direct
from gpu_runner.providers.engine_process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_chromium]

REBOUND = "attacker.example"
MUTATION = 'mutation { setConcurrencyLimit(concurrencyKey: "%s", limit: 1) }'

# Each attempt is named by how it is made; "error" and "opaque" are what a page sees of an answer that it may not read.
ATTEMPTS = """async ({ui, mutation}) => {
  const url = ui + '/graphql', said = {};
  const change = name => mutation.replace('%s', name.replaceAll(' ', '-'));
  const get = name => url + '?query=' + encodeURIComponent(change(name));
  const json = name => JSON.stringify({query: change(name)});
  const asked = async (name, address, options) => {
    try {
      const answer = await fetch(address, {credentials: 'include', ...options});
      said[name] = answer.type == 'opaque' ? 'opaque' : answer.status;
    } catch (error) { said[name] = 'error'; }
  };
  const simple = {method: 'POST', mode: 'no-cors'};
  await asked('get', get('get'), {mode: 'no-cors'});
  await asked('get with cors', get('get with cors'), {});
  await asked('text', url, {...simple, body: json('text')});
  await asked('query string', get('query string'), simple);
  await asked('fields', get('fields'), {...simple, body: new URLSearchParams({query: change('fields')})});
  await asked('json', url, {method: 'POST', headers: {'Content-Type': 'application/json'}, body: json('json')});
  await asked('report', ui + '/report_asset_materialization/stolen', simple);
  await asked('report check', ui + '/report_asset_check/stolen?check_name=a&passed=true', simple);
  said.image = await new Promise(done => {
    const image = new Image();
    image.onload = () => done('loaded'); image.onerror = () => done('error'); image.src = get('image');
  });
  said.socket = await new Promise(done => {
    const socket = new WebSocket(url.replace('http', 'ws'), 'graphql-ws');
    socket.onopen = () => done('open'); socket.onerror = () => done('error');
  });
  const frame = async (name, fill) => {
    const made = document.createElement('iframe'); made.name = name; document.body.append(made);
    await new Promise(done => { made.onload = done; fill(made); setTimeout(done, 30000); });
    try { said[name] = made.contentDocument ? made.contentDocument.body.innerText : 'unreadable'; }
    catch (error) { said[name] = 'unreadable'; }
  };
  await frame('frame', made => made.src = ui + '/');
  await frame('form', made => {
    const form = document.createElement('form'); form.method = 'POST'; form.target = 'form'; form.action = get('form');
    form.enctype = 'text/plain'; document.body.append(form); form.submit();
  });
  return said;
}"""
FETCHED = {"get", "get with cors", "text", "query string", "fields", "json", "report", "report check"}


@contextlib.contextmanager
def foreign_site() -> Iterator[int]:
    """A web server of somebody else on this machine; its port."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html><body>foreign</body></html>")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def webserver(home: Path) -> Iterator[str]:
    """Our webserver alone, without code location and daemon; its address."""
    (home / "workspace.yaml").write_text("load_from: []\n")
    port = free_port()
    command = [sys.executable, "-m", "batch_assets.webserver.server", "--port", str(port)]
    log = (home / "webserver.log").open("wb")
    environment = {**os.environ, "DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "1"}
    with (
        log,
        subprocess.Popen(
            [*command, "--workspace", str(home / "workspace.yaml")], stdout=log, stderr=log, env=environment
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            with contextlib.suppress(OSError), direct.open(f"{url}/server_info", timeout=5) as answer:
                return bool(answer.status == 200)
            assert process.poll() is None, (home / "webserver.log").read_text()
            return False

        try:
            eventually(answers, 60, "the webserver")
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)


def check_attempts(instance: dg.DagsterInstance, said: dict[str, Any], *, rebound: bool = False) -> None:
    """All of them were made, and none has changed anything."""
    assert said.keys() == FETCHED | {"image", "socket", "frame", "form"}
    assert {said[name] for name in FETCHED} <= ({403} if rebound else {"error", "opaque"}), said
    assert said["image"] == said["socket"] == "error"
    assert said["frame"] == "unreadable" or "refused" in said["frame"]
    assert instance.event_log_storage.get_concurrency_keys() == set()
    assert list(instance.all_asset_keys()) == []


def test_a_foreign_page_in_a_browser_changes_nothing_and_a_page_of_the_ui_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.sync_api import sync_playwright

    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    home = prepare_home()
    ensure_storage(home)
    with (
        dg.DagsterInstance.from_config(str(home)) as instance,
        webserver(home) as url,
        foreign_site() as port,
        sync_playwright() as playwright,
    ):
        names = f"MAP {REBOUND} {url.removeprefix('http://')}, MAP foreign.test 127.0.0.1:{port}"
        # Chromium's own protection of loopback is off: the guard has to do without it.
        weaker = "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests"
        arguments = [*ARGUMENTS, f"--host-resolver-rules={names}", weaker]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=90_000)
        try:
            context = chromium.new_context()
            page = context.new_page()
            page.set_default_timeout(90_000)
            page.goto(url)
            assert [(cookie["sameSite"], cookie["httpOnly"]) for cookie in context.cookies()] == [("Strict", True)]
            tried = {"ui": url, "mutation": MUTATION}
            for origin in (f"http://127.0.0.1:{port}", f"http://localhost:{port}", "http://foreign.test"):
                page.goto(origin)
                check_attempts(instance, page.evaluate(ATTEMPTS, tried))
            # A name of the attacker's that leads to us now: for the browser all of it is one origin.
            answer = page.goto(f"http://{REBOUND}/")
            assert answer is not None and answer.status == 403
            said = page.evaluate(ATTEMPTS, {**tried, "ui": f"http://{REBOUND}"})
            check_attempts(instance, said, rebound=True)

            refused: list[str] = []
            page.on("response", lambda one: refused.append(one.url) if one.status in (403, 405, 413, 415) else None)
            for path in ("/", "/runs", "/assets", "/locations", "/deployment/daemons"):
                page.goto(f"{url}{path}", wait_until="networkidle")
            assert refused == []
            assert "Daemon" in page.inner_text("body")
            said = page.evaluate(ATTEMPTS, tried)
            assert (said["json"], said["socket"], said["get"], said["text"]) == (200, "open", 405, 415)
            assert instance.event_log_storage.get_concurrency_keys() == {"json"}
        finally:
            chromium.close()
