"""`/v1/batches`, a case for each documented sentence, on a simulated engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api_service import CHAT, ApiService, api_service, line
from support.simulated_engine import SimulatedEngine, simulated_engine
from support.timing import PATIENCE

from batch_assets.api.settings import ApiLimits
from resources.objects.opening import Objects

Steps = Callable[[ApiService], Coroutine[Any, Any, None]]
BATCH_FIELDS = {
    "id",
    "object",
    "endpoint",
    "model",
    "errors",
    "input_file_id",
    "completion_window",
    "status",
    "output_file_id",
    "error_file_id",
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
    "request_counts",
    "usage",
    "metadata",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--speed", "20", "--output-tokens", "fixed:8", "--max-model-len", "200") as found:
        yield found


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[SimulatedEngine]:
    with simulated_engine("--max-num-seqs", "2", "--weights-ms", "100", "--output-tokens", "fixed:4") as found:
        yield found


def on_site(tmp_path: Path, endpoint: str, steps: Steps, limits: ApiLimits | None = None) -> None:
    async def run() -> None:
        async with api_service(tmp_path, endpoint, limits) as site:
            await steps(site)

    asyncio.run(run())


def check_sums(batch: Any, lines: int, output: list[Any], errors: list[Any]) -> None:
    """Output and error lines are the input's, each id once, and the counts say the same."""
    ids = [one["custom_id"] for one in output + errors]
    assert len(ids) == len(set(ids)) == lines
    assert batch["request_counts"] == {"total": lines, "completed": len(output), "failed": len(errors)}
    for one in output + errors:
        assert set(one) == {"id", "custom_id", "response", "error"} and one["id"].startswith("batch_req_")


def test_a_batch_goes_from_lines_to_an_output_file(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        made = await site.create([line(f"r{number}") for number in range(260)], metadata={"who": "me"})
        assert set(made) == BATCH_FIELDS and made["object"] == "batch" and made["id"].startswith("batch_")
        assert made["status"] == "validating" and made["completion_window"] == "24h"
        assert made["expires_at"] - made["created_at"] == 86_400
        unset = BATCH_FIELDS - {"id", "object", "endpoint", "input_file_id", "completion_window", "status"}
        unset -= {"created_at", "expires_at", "request_counts", "metadata"}
        assert {name for name in unset if made[name] is not None} == set()
        batch = await site.until(made["id"])
        assert batch["status"] == "completed" and batch["metadata"] == {"who": "me"} and batch["model"] == "tiny"
        assert batch["error_file_id"] is None and batch["errors"] is None
        times = [batch[name] for name in ("created_at", "in_progress_at", "finalizing_at", "completed_at")]
        assert times == sorted(times) and all(isinstance(time, int) for time in times)
        assert [batch[name] for name in ("failed_at", "expired_at", "cancelling_at", "cancelled_at")] == [None] * 4
        output, errors = await site.results(batch)
        check_sums(batch, 260, output, errors)
        for one in output:
            assert one["error"] is None and one["response"]["status_code"] == 200
            assert one["response"]["request_id"] and one["response"]["body"]["object"] == "chat.completion"
        used = batch["usage"]
        assert set(used) == {
            "input_tokens",
            "input_tokens_details",
            "output_tokens",
            "output_tokens_details",
            "total_tokens",
        }
        assert used["output_tokens"] == sum(one["response"]["body"]["usage"]["completion_tokens"] for one in output)
        assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
        file = (await site.client.get(f"/v1/files/{batch['output_file_id']}")).json()
        assert file["purpose"] == "batch_output" and file["filename"] == f"{batch['id']}_output.jsonl"
        listed = (await site.client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"]
        assert [one["id"] for one in listed] == [batch["output_file_id"]]

    on_site(tmp_path, engine.url, steps)


@pytest.mark.parametrize(
    ("endpoint", "kind"),
    [("/v1/completions", "text_completion"), ("/v1/embeddings", "list"), (CHAT, "chat.completion")],
)
def test_each_endpoint_answers_with_its_own_body(
    tmp_path: Path, engine: SimulatedEngine, endpoint: str, kind: str
) -> None:
    async def steps(site: ApiService) -> None:
        batch = await site.until((await site.create([line("a", endpoint), line("b", endpoint)], endpoint))["id"])
        output, errors = await site.results(batch)
        check_sums(batch, 2, output, errors)
        assert [one["response"]["body"]["object"] for one in output] == [kind, kind]
        assert [one["custom_id"] for one in output] == ["a", "b"]

    on_site(tmp_path, engine.url, steps)


def test_lines_of_one_text_for_vectors_go_out_as_lists_and_a_refused_one_is_found(tmp_path: Path) -> None:
    url, log = "/v1/embeddings", tmp_path / "log"
    refusal = json.dumps([{"kind": "too_long", "match": {"contains": "oops"}}])
    lines = [line(f"oops {number}" if number in (17, 180) else f"text {number}", url) for number in range(300)]
    lines[40]["body"]["input"] = ["two", "texts"]
    lines[50]["body"]["encoding_format"] = "base64"

    async def steps(site: ApiService) -> None:
        batch = await site.until((await site.create(lines, url))["id"])
        output, errors = await site.results(batch)
        check_sums(batch, 300, output, errors)
        assert [one["custom_id"] for one in errors] == ["oops 17", "oops 180"]
        assert {one["response"]["status_code"] for one in errors} == {400}
        bodies = {one["custom_id"]: one["response"]["body"] for one in output}
        assert {len(body["data"]) for body in bodies.values()} == {1, 2} and len(bodies["text 40"]["data"]) == 2
        assert isinstance(bodies["text 50"]["data"][0]["embedding"], str)
        vectors = {tuple(body["data"][0]["embedding"]) for name, body in bodies.items() if name != "text 50"}
        assert len(vectors) == 297, "each line has the vector of its own text"
        assert batch["usage"]["input_tokens"] == sum(body["usage"]["prompt_tokens"] for body in bodies.values())

    options = ("--speed", "20", "--faults", refusal, "--request-log", str(log))
    with simulated_engine(*options) as vectors:
        on_site(tmp_path, vectors.url, steps)
        assert received(log, 1) < 100


def test_lines_for_vectors_that_differ_in_more_than_their_text_go_alone(tmp_path: Path) -> None:
    url, log = "/v1/embeddings", tmp_path / "log"
    refusal = json.dumps([{"kind": "too_long", "match": {"contains": "oops"}}])
    lines = [line("oops" if number == 7 else f"text {number}", url, user=f"u{number}") for number in range(64)]

    async def steps(site: ApiService) -> None:
        batch = await site.until((await site.create(lines, url))["id"])
        output, errors = await site.results(batch)
        check_sums(batch, 64, output, errors)
        assert [one["custom_id"] for one in errors] == ["oops"]

    with simulated_engine("--speed", "20", "--faults", refusal, "--request-log", str(log)) as vectors:
        on_site(tmp_path, vectors.url, steps)
        assert received(log, 64) <= 64 + 8, "once each, and a few canaries"


def received(log: Path, least: int) -> int:
    """Requests in the log of an engine that writes it a few times a second, once it names so many."""
    deadline = time.monotonic() + 10 * PATIENCE
    while (found := log.read_text().count('"event":"received"')) < least:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_lines_that_the_engine_refuses_are_in_the_error_file(tmp_path: Path, engine: SimulatedEngine) -> None:
    long = [{"role": "user", "content": "word " * 1_000}]

    async def steps(site: ApiService) -> None:
        mixed = await site.until((await site.create([line("good"), line("long", messages=long)]))["id"])
        output, errors = await site.results(mixed)
        assert mixed["status"] == "completed"
        check_sums(mixed, 2, output, errors)
        assert [one["custom_id"] for one in errors] == ["long"]
        assert errors[0]["error"] is None and errors[0]["response"]["status_code"] == 400
        assert "error" in errors[0]["response"]["body"] or "message" in errors[0]["response"]["body"]
        bad = await site.until((await site.create([line(f"{n}", messages=long) for n in range(9)]))["id"])
        assert (bad["status"], bad["output_file_id"]) == ("completed", None)
        assert bad["request_counts"] == {"total": 9, "completed": 0, "failed": 9}
        assert len(await site.lines_of(bad["error_file_id"])) == 9

    on_site(tmp_path, engine.url, steps)


def test_a_number_out_of_range_costs_its_own_line_only(tmp_path: Path, engine: SimulatedEngine) -> None:
    out_of_range = [{"max_tokens": 0}, {"max_tokens": -1}, {"n": 0}, {"max_completion_tokens": -5}]

    async def steps(site: ApiService) -> None:
        lines = [line("good"), *(line(str(number), **body) for number, body in enumerate(out_of_range))]
        batch = await site.until((await site.create(lines))["id"])
        output, errors = await site.results(batch)
        assert batch["status"] == "completed" and batch["errors"] is None
        check_sums(batch, 5, output, errors)
        assert [one["custom_id"] for one in output] == ["good"]
        for one in errors:
            assert one["error"] is None and one["response"]["status_code"] == 400
            error = one["response"]["body"]["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"

    on_site(tmp_path, engine.url, steps)


WRONG: list[tuple[str, list[Any], str, int | None]] = [
    ("no json", [line("a"), b"{broken"], "invalid_json_line", 2),
    ("a list", [b"[1]"], "invalid_json_line", 1),
    ("a byte order mark within", [line("a"), b"\xef\xbb\xbf{}"], "invalid_json_line", 2),
    ("no json after blank lines", [b"", line("a"), b" ", b"{broken"], "invalid_json_line", 4),
    ("no id", [{**line("a"), "custom_id": None}], "missing_required_parameter", 1),
    ("a number as id", [{**line("a"), "custom_id": 7}], "invalid_value", 1),
    ("the same id", [line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
    ("another url", [line("a", "/v1/embeddings")], "url_mismatch", 1),
    ("no url", [{**line("a"), "url": None}], "missing_required_parameter", 1),
    ("GET", [{**line("a"), "method": "GET"}], "invalid_method", 1),
    ("no body", [{**line("a"), "body": None}], "missing_required_parameter", 1),
    ("no model", [line("a", model=None)], "missing_required_parameter", 1),
    ("two models", [line("a"), line("b", model="other")], "model_mismatch", 2),
    ("an unknown model", [line("a", model="nobody")], "model_not_found", 1),
    ("stream", [line("a", stream=True)], "unsupported_parameter", 1),
    ("no messages", [line("a", messages=[])], "invalid_value", 1),
    ("max_tokens as text", [line("a", max_tokens="8")], "invalid_value", 1),
    ("n as true", [line("a", n=True)], "invalid_value", 1),
    ("best_of as text", [line("a", best_of="50")], "invalid_value", 1),
    ("nothing", [], "empty_file", None),
    ("too many", [line(str(number)) for number in range(6)], "too_many_tasks", None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("lines", "code", "number"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_input_fails_the_batch_with_code_and_line(
    tmp_path: Path, engine: SimulatedEngine, lines: list[Any], code: str, number: int | None
) -> None:
    async def steps(site: ApiService) -> None:
        batch = await site.until((await site.create(lines))["id"])
        assert batch["status"] == "failed" and batch["failed_at"] is not None and batch["in_progress_at"] is None
        assert batch["errors"]["object"] == "list"
        found = batch["errors"]["data"][0]
        assert set(found) == {"code", "message", "param", "line"} and found["message"]
        assert (found["code"], found["line"]) == (code, number)
        assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert batch["output_file_id"] is None and batch["error_file_id"] is None

    on_site(tmp_path, engine.url, steps, ApiLimits(lines=5))


def test_all_errors_of_a_file_are_told_at_once_up_to_a_limit(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        lines = [line("a"), b"x", {**line("a"), "method": "PUT"}, line("b", model="c"), *[b"y"] * 10]
        batch = await site.until((await site.create(lines))["id"])
        found = [(error["code"], error["line"]) for error in batch["errors"]["data"]]
        assert found[:4] == [
            ("invalid_json_line", 2),
            ("duplicate_custom_id", 3),
            ("invalid_method", 3),
            ("model_mismatch", 4),
        ]
        assert len(found) == 6

    on_site(tmp_path, engine.url, steps, ApiLimits(listed_errors=6))


def test_blank_lines_and_a_byte_order_mark_are_no_lines(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        first = b"\xef\xbb\xbf" + json.dumps(line("a")).encode()
        batch = await site.until((await site.create([first, b"", line("b"), b"  ", b"\n"]))["id"])
        assert (batch["status"], batch["request_counts"]["total"]) == ("completed", 2)

    on_site(tmp_path, engine.url, steps)


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"input_file_id": None}, "input_file_id"),
    ({"input_file_id": "file-nothing"}, "input_file_id"),
    ({"endpoint": "/v1/poems"}, "endpoint"),
    ({"endpoint": None}, "endpoint"),
    ({"completion_window": "soon"}, "completion_window"),
    ({"completion_window": "0s"}, "completion_window"),
    ({"completion_window": "-1h"}, "completion_window"),
    ({"completion_window": None}, "completion_window"),
    ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: "x"}}, "metadata"),
    ({"metadata": {"k": "x" * 513}}, "metadata.k"),
    ({"metadata": {"k": 1}}, "metadata.k"),
    ({"metadata": {"budget_usd": "none"}}, "metadata.budget_usd"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 2592001}}, "output_expires_after.seconds"),
    ({"colour": "red"}, "colour"),
]


def test_a_wrong_create_is_status_400_and_names_the_parameter(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        right = {"input_file_id": await site.upload([line("a")]), "endpoint": CHAT, "completion_window": "24h"}
        for change, param in REFUSED:
            body = {name: value for name, value in {**right, **change}.items() if value is not None}
            answer = await site.client.post("/v1/batches", json=body)
            error = answer.json()["error"]
            found = (answer.status_code, error["type"], error["param"])
            assert found == (400, "invalid_request_error", param), change
        assert (await site.client.get("/v1/batches")).json()["data"] == []

    on_site(tmp_path, engine.url, steps)


def test_an_output_file_is_no_input(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        batch = await site.until((await site.create([line("a")]))["id"])
        body = {"input_file_id": batch["output_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        answer = await site.client.post("/v1/batches", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "input_file_id"

    on_site(tmp_path, engine.url, steps)


@pytest.mark.parametrize(("window", "seconds"), [("90s", 90), ("7d", 604_800), ("1h", 3600)])
def test_the_window_is_any_time(tmp_path: Path, engine: SimulatedEngine, window: str, seconds: int) -> None:
    async def steps(site: ApiService) -> None:
        batch = await site.create([line("a")], window=window)
        assert batch["expires_at"] - batch["created_at"] == seconds and batch["completion_window"] == window

    on_site(tmp_path, engine.url, steps)


def test_output_files_live_as_long_as_it_is_said(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        after = {"anchor": "created_at", "seconds": 3600}
        batch = await site.until((await site.create([line("a")], output_expires_after=after))["id"])
        file = (await site.client.get(f"/v1/files/{batch['output_file_id']}")).json()
        assert file["expires_at"] == file["created_at"] + 3600

    on_site(tmp_path, engine.url, steps)


def test_a_create_that_is_repeated_makes_one_batch(tmp_path: Path) -> None:
    async def steps(site: ApiService) -> None:
        body = {"input_file_id": await site.upload([line("a")]), "endpoint": CHAT, "completion_window": "24h"}

        async def create(**headers: str) -> Any:
            answer = await site.client.post("/v1/batches", json=body, headers=headers)
            return answer.json()["id"] if answer.status_code == 200 else answer.json()["error"]["code"]

        first = await create(**{"x-stainless-retry-count": "0"})
        assert await create(**{"x-stainless-retry-count": "1"}) == first
        assert await create(**{"x-stainless-retry-count": "0"}) != first
        keyed = await create(**{"idempotency-key": "k"})
        assert await asyncio.gather(*(create(**{"idempotency-key": "k"}) for _ in range(8))) == [keyed] * 8
        assert keyed != first
        body["completion_window"] = "1h"
        assert await create(**{"idempotency-key": "k"}) == "idempotency_key_reused"
        body["completion_window"] = "24h"
        await site.client.delete(f"/v1/files/{body['input_file_id']}")
        assert await create(**{"idempotency-key": "k"}) == keyed
        assert await create(**{"idempotency-key": "other"}) == "invalid_value"
        assert len((await site.client.get("/v1/batches")).json()["data"]) == 3

    on_site(tmp_path, "http://127.0.0.1:9", steps)  # no engine: no batch ends meanwhile


def test_lists_go_newest_first_and_page_by_the_id_of_the_last_batch(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        made = [(await site.create([line("a")]))["id"] for _ in range(5)]
        seen: list[str] = []
        after: dict[str, Any] = {}
        while True:
            page = (await site.client.get("/v1/batches", params={"limit": 2, **after})).json()
            seen += [batch["id"] for batch in page["data"]]
            assert page["object"] == "list" and set(page["data"][0]) == BATCH_FIELDS
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert seen == made[::-1]
        for query in ({"limit": 0}, {"limit": 101}):
            assert (await site.client.get("/v1/batches", params=query)).status_code == 400
        assert (await site.client.get("/v1/batches", params={"after": "batch_x"})).status_code == 404

    on_site(tmp_path, engine.url, steps)


def test_a_batch_of_another_tenant_is_not_there(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        batch = await site.create([line("a")])
        other = {"x-tenant": "b"}
        for method, path in (("GET", ""), ("POST", "/cancel")):
            answer = await site.client.request(method, f"/v1/batches/{batch['id']}{path}", headers=other)
            assert answer.status_code == 404
        assert (await site.client.get("/v1/batches", headers=other)).json()["data"] == []
        assert (await site.until(batch["id"]))["status"] == "completed"

    on_site(tmp_path, engine.url, steps)


@pytest.mark.slow
def test_a_tenant_with_many_lines_does_not_hold_up_another(tmp_path: Path) -> None:
    async def create(site: ApiService, tenant: dict[str, str], lines: int) -> str:
        file = await site.upload([line(str(number)) for number in range(lines)], **tenant)
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str((await site.client.post("/v1/batches", json=asked, headers=tenant)).json()["id"])

    async def counts(site: ApiService, tenant: dict[str, str], name: str) -> Any:
        return (await site.client.get(f"/v1/batches/{name}", headers=tenant)).json()["request_counts"]

    async def steps(site: ApiService) -> None:
        many, few = {"x-tenant": "many"}, {"x-tenant": "few"}
        large = await create(site, many, 10_000)
        while (await counts(site, many, large))["completed"] < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        small = await create(site, few, 10)
        while (await counts(site, few, small))["completed"] < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert (await counts(site, many, large))["completed"] < 2_000
        await site.client.post(f"/v1/batches/{large}/cancel", headers=many)

    with simulated_engine("--max-num-seqs", "16", "--weights-ms", "5", "--output-tokens", "fixed:4") as engine:
        on_site(tmp_path, engine.url, steps)


def test_a_cancelled_batch_delivers_what_is_finished(tmp_path: Path, slow_engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        made = await site.create([line(str(number)) for number in range(600)])
        before = 0
        while not before:
            batch = await site.get(made["id"])
            assert batch["request_counts"]["completed"] >= before
            before = batch["request_counts"]["completed"]
            await asyncio.sleep(0.05)
        answer = await site.client.post(f"/v1/batches/{made['id']}/cancel")
        assert answer.status_code == 200 and answer.json()["status"] == "cancelling" and answer.json()["cancelling_at"]
        batch = await site.until(made["id"])
        assert batch["status"] == "cancelled" and batch["cancelled_at"] and not batch["completed_at"]
        output, errors = await site.results(batch)
        check_sums(batch, 600, output, errors)
        assert len(output) >= before
        assert {(one["response"] is None, one["error"]["code"]) for one in errors} == {(True, "batch_cancelled")}
        cancel = f"/v1/batches/{made['id']}/cancel"
        assert (await site.client.post(cancel)).status_code == 400
        again = await site.client.post(cancel, headers={"x-stainless-retry-count": "1"})  # the answer was lost
        assert again.status_code == 200 and again.json()["status"] == "cancelled"

    on_site(tmp_path, slow_engine.url, steps)


def test_a_finished_batch_cannot_be_cancelled(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        for lines in ([line("a")], [b"x"]):
            batch = await site.until((await site.create(lines))["id"])
            answer = await site.client.post(f"/v1/batches/{batch['id']}/cancel")
            assert answer.status_code == 400 and batch["status"] in answer.json()["error"]["message"]
            assert await site.get(batch["id"]) == batch
        assert (await site.client.post("/v1/batches/batch_x/cancel")).status_code == 404

    on_site(tmp_path, engine.url, steps)


@pytest.mark.slow
def test_at_the_end_of_the_window_what_is_finished_is_delivered(tmp_path: Path, slow_engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        batch = await site.until((await site.create([line(str(number)) for number in range(600)], window="3s"))["id"])
        assert batch["status"] == "expired" and batch["expired_at"] >= batch["expires_at"]
        output, errors = await site.results(batch)
        check_sums(batch, 600, output, errors)
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}

    on_site(tmp_path, slow_engine.url, steps)


def test_without_an_engine_a_batch_waits_and_can_be_cancelled(tmp_path: Path) -> None:
    async def steps(site: ApiService) -> None:
        made = await site.create([line("a"), line("b")])
        assert (await site.until(made["id"], "in_progress"))["status"] == "in_progress"
        await site.client.post(f"/v1/batches/{made['id']}/cancel")
        batch = await site.until(made["id"])
        output, errors = await site.results(batch)
        check_sums(batch, 2, output, errors)
        assert batch["status"] == "cancelled" and output == []

    on_site(tmp_path, "http://127.0.0.1:9", steps)


def test_the_input_may_be_deleted_while_its_batch_runs(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        made = await site.create([line(str(number)) for number in range(50)])
        assert (await site.client.delete(f"/v1/files/{made['input_file_id']}")).status_code == 200
        assert (await site.until(made["id"]))["request_counts"] == {"total": 50, "completed": 50, "failed": 0}

    on_site(tmp_path, engine.url, steps)


@pytest.mark.slow
def test_many_small_batches_share_one_engine(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        made = [await site.create([line(f"{n}-{m}") for m in range(3)]) for n in range(30)]
        for one in made:
            batch = await site.until(one["id"])
            output, errors = await site.results(batch)
            check_sums(batch, 3, output, errors)
            assert len(output) == 3

    on_site(tmp_path, engine.url, steps)


def test_models_are_those_of_the_engine(tmp_path: Path, engine: SimulatedEngine) -> None:
    async def steps(site: ApiService) -> None:
        listed = (await site.client.get("/v1/models")).json()
        assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["tiny"]
        one = (await site.client.get("/v1/models/tiny")).json()
        assert set(one) == {"id", "object", "created", "owned_by", "shutdown_date"} and one["object"] == "model"
        missing = await site.client.get("/v1/models/meta/llama")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"

    on_site(tmp_path, engine.url, steps)


@pytest.mark.slow
def test_on_s3_a_batch_is_the_same(tmp_path: Path, engine: SimulatedEngine, s3_objects: Objects) -> None:
    async def run() -> None:
        async with api_service(tmp_path, engine.url, store_root=s3_objects.root) as site:
            data = [line(f"r{number}", user="x" * 5_000) for number in range(600)]
            batch = await site.until((await site.create(data))["id"])
            output, errors = await site.results(batch)
            check_sums(batch, 600, output, errors)
            assert batch["status"] == "completed" and len(output) == 600

    asyncio.run(run())
