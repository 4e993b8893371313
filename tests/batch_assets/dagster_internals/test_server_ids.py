"""Daemon and webserver ask the code server seldom who it is while it answers, and at once while it does not."""

from __future__ import annotations

import threading
import time

import pytest
from dagster._core.errors import DagsterUserCodeUnreachableError
from dagster._grpc.client import DagsterGrpcClient
from dagster._grpc.server_watcher import watch_grpc_server_thread
from support.timing import PATIENCE

from batch_assets.dagster_internals.server_ids import ASK_SECONDS, ask_seldom


class Server:
    """Who answers, by what was asked so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.name, self.now = 0, "first", 0.0
        monkeypatch.setattr(DagsterGrpcClient, "get_server_id", lambda client, timeout=60: self.answer())
        ask_seldom(lambda: self.now)
        self.client = DagsterGrpcClient(socket="/nowhere")

    def answer(self) -> str:
        self.asked += 1
        if not self.name:
            raise DagsterUserCodeUnreachableError("nobody answers")
        return self.name


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_an_answer_counts_for_seconds(server: Server):
    assert [server.client.get_server_id() for _ in range(5)] == ["first"] * 5
    assert server.asked == 1
    server.name, server.now = "second", ASK_SECONDS
    assert server.client.get_server_id() == "second"
    assert server.asked == 2


def test_each_client_asks_for_itself(server: Server):
    """The location that is loaded anew has a client of its own: it must not take an old answer for a new one."""
    assert server.client.get_server_id() == "first"
    server.name = "second"
    assert DagsterGrpcClient(socket="/nowhere").get_server_id() == "second"


def test_while_nobody_answers_each_look_asks(server: Server):
    assert server.client.get_server_id() == "first"
    server.name, server.now = "", ASK_SECONDS
    for _ in range(3):
        with pytest.raises(DagsterUserCodeUnreachableError):
            server.client.get_server_id()
    server.name = "second"
    assert server.client.get_server_id() == "second"
    assert server.asked == 5


def test_dagsters_watch_of_the_server_asks_so_and_sees_a_new_one(server: Server):
    stop, seen, looks = threading.Event(), list[str](), [0]

    def look(_: str) -> None:
        looks[0] += 1

    thread = threading.Thread(
        target=watch_grpc_server_thread,
        args=("here", server.client, stop),
        kwargs={
            "get_location_entry": look,
            "refresh_code_location": look,
            "on_disconnect": look,
            "on_reconnected": look,
            "on_updated": lambda _, name: seen.append(name),
            "on_error": look,
            "watch_interval": 0.01,
            "error_recovery_interval": 0,
        },
    )
    thread.start()
    try:
        wait_until(lambda: looks[0] > 10)
        assert server.asked == 1
        server.name, server.now = "second", ASK_SECONDS
        wait_until(lambda: seen == ["second"])
    finally:
        stop.set()
        thread.join()


def wait_until(true: object) -> None:
    deadline = time.monotonic() + 10 * PATIENCE
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)
