"""A hostile web page in a real browser, beside the real UI: nothing of what it tries reaches Dagster."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.browser import ARGUMENTS, CHROMIUM, browser, needs_chromium
from e2e.harness import Platform, eventually, platform
from e2e.test_browser import tales
from gpu_runner.providers.local import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_chromium]

REBOUND = "attacker.example"

# Each attempt says how it was answered: "opaque" for what the page may not read, "error" when the browser saw none.
ATTEMPTS = """async ({ui, mutation}) => {
  const url = ui + '/graphql', said = {}, body = JSON.stringify({query: mutation});
  const asked = async (name, address, options) => {
    try {
      const answer = await fetch(address, options);
      said[name] = answer.type == 'opaque' ? 'opaque' : answer.status;
    }
    catch (error) { said[name] = 'error'; }
  };
  const get = url + '?query=' + encodeURIComponent(mutation);
  await asked('get', get, {mode: 'no-cors', credentials: 'include'});
  await asked('get with cors', get, {credentials: 'include'});
  await asked('text', url, {method: 'POST', mode: 'no-cors', credentials: 'include', body});
  const headers = {'Content-Type': 'application/json'};
  await asked('json', url, {method: 'POST', credentials: 'include', headers, body});
  await asked('query', get, {method: 'POST', mode: 'no-cors', credentials: 'include'});
  await asked('report', ui + '/report_asset_materialization/tales/rows',
              {method: 'POST', mode: 'no-cors', credentials: 'include'});
  said.image = await new Promise(done => {
    const image = new Image();
    image.onload = () => done('loaded'); image.onerror = () => done('error'); image.src = get;
  });
  said.socket = await new Promise(done => {
    const socket = new WebSocket(url.replace('http', 'ws'), 'graphql-ws');
    socket.onopen = () => done('open'); socket.onerror = () => done('error');
  });
  const frame = async (name, fill) => {
    const made = document.createElement('iframe'); made.name = name; document.body.append(made);
    await new Promise(done => { made.onload = done; fill(made); setTimeout(done, 3000); });
    try { said[name] = made.contentDocument ? made.contentDocument.body.innerText : 'unreadable'; }
    catch (error) { said[name] = 'unreadable'; }
  };
  await frame('framed', made => made.src = ui + '/');
  await frame('form', made => {
    const form = document.createElement('form'); form.method = 'POST'; form.target = 'form'; form.action = get;
    form.enctype = 'text/plain'; document.body.append(form); form.submit();
  });
  return said;
}"""


@contextlib.contextmanager
def foreign_page() -> Iterator[int]:
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


def launch_mutation() -> str:
    """A mutation that needs no variables: a run of the refresh job, with a tag that names an engine."""
    where = 'repositoryLocationName: "batch_assets", repositoryName: "__repository__", jobName: "tales_refresh"'
    tag = '{key: "batch/endpoint", value: "http://attacker.example:8000"}'
    return (
        f'mutation {{ launchRun(executionParams: {{selector: {{{where}}}, mode: "default", runConfigData: "{{}}", '
        f"executionMetadata: {{tags: [{tag}]}}}}) {{ __typename }} }}"
    )


def check_attempts(site: Platform, said: dict[str, Any], *, same_host: bool = False) -> None:
    """All of them were made, and none has started a run or reported anything."""
    names = {"get", "get with cors", "text", "json", "query", "report", "image", "socket", "framed", "form"}
    assert said.keys() == names
    assert said["image"] == said["socket"] == "error"
    for name in names - {"image", "socket", "framed", "form"}:
        assert said[name] in ((403, 405, 415) if same_host else ("error", "opaque")), said
    assert "Dagster" not in str(said["framed"])
    assert site.instance.get_runs() == []
    assert not list(site.instance.all_asset_keys())


def test_a_foreign_page_in_a_browser_starts_nothing_and_the_ui_starts_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.sync_api import sync_playwright

    dead = f"http://127.0.0.1:{free_port()}"  # a proxy that does not answer: nothing on loopback may ask it
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, dead)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with platform(tmp_path, monkeypatch, tales(250), simulator=["--speed", "20"]) as site, foreign_page() as port:
        tried = {"ui": site.stack.url, "mutation": launch_mutation()}
        rebinding = (
            f"--host-resolver-rules=MAP *.example 127.0.0.1:{site.stack.port}, MAP foreign.test 127.0.0.1:{port}"
        )
        arguments = [*ARGUMENTS, rebinding, "--no-proxy-server", "--disable-features=LocalNetworkAccessChecks"]
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=90_000)
            try:
                context = chromium.new_context()
                page = context.new_page()
                page.goto(site.stack.url)  # the browser has the cookie of the UI
                assert [cookie["sameSite"] for cookie in context.cookies()] == ["Strict"]
                for origin in (f"http://127.0.0.1:{port}", f"http://localhost:{port}", "http://foreign.test"):
                    page.goto(origin)
                    check_attempts(site, page.evaluate(ATTEMPTS, tried))
                # A name of the attacker's that leads to us: the browser takes it for one and the same origin.
                answer = page.goto(f"http://{REBOUND}/")
                assert answer is not None and answer.status == 403
                assert "Host" in page.inner_text("body")
                check_attempts(site, page.evaluate(ATTEMPTS, {**tried, "ui": f"http://{REBOUND}"}), same_host=True)
            finally:
                chromium.close()
        with browser(site.stack.url, site.name, tmp_path) as ui:
            ui.open_asset("prompts")
            ui.press("Materialize")
            eventually(lambda: site.store.current_snapshot(), 60, "a snapshot")
        assert len(site.instance.get_runs()) == 1
