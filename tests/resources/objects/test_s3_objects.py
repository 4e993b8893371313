"""Objects in a bucket: what the server's answers mean."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from resources.objects.opening import Objects, StoreError, open_objects, self_test


@pytest.fixture
def odd_s3(s3_objects: Objects, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An S3 server that answers every request with the statuses in the list, one after the other, the last for ever."""
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD = do_PUT = do_DELETE = answer

        def log_message(self, *said: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield statuses
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_store_that_ignores_the_condition_fails_its_self_test(odd_s3: list[int]) -> None:
    odd_s3.append(200)
    with pytest.raises(StoreError, match="refuse a second create"):
        self_test(open_objects("s3://bucket/x"))


def test_a_bucket_that_denies_or_is_not_there_fails_its_self_test(odd_s3: list[int]) -> None:
    odd_s3.append(403)
    with pytest.raises(StoreError, match="cannot write here") as caught:
        self_test(open_objects("s3://bucket/x"))
    assert "\n" not in str(caught.value)


def test_a_create_whose_reply_was_lost_is_ours(s3_objects: Objects) -> None:
    """The PUT arrived and its reply did not: the client's own retry then finds the object there, with our bytes."""
    s3_objects.put("a/b", b"ours")
    assert s3_objects.create("a/b", b"ours")


def test_a_conflict_with_nothing_there_is_tried_again(odd_s3: list[int]) -> None:
    odd_s3 += [409, 404, 412, 404, 200]
    assert open_objects("s3://bucket/x").create("a/b", b"1")


def test_s3_without_credentials_is_refused(s3_objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(StoreError, match="cannot write here"):
        self_test(open_objects("s3://bucket/x"))
