"""The local port of a tunnel: ours all the time, whatever becomes of what listens behind it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.machines import eventually

from gpu_runner.providers.kubernetes.port_relay import PortRelay

SECONDS = 20.0


@contextmanager
def relay(held_seconds: float = SECONDS) -> Iterator[PortRelay]:
    made = PortRelay(held_seconds)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def shouting_server() -> Iterator[int]:
    """Answers each connection with all that it sent, in capitals, once that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(read_all(connection).upper())

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(SECONDS)
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def ask(port: int, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


def test_bytes_pass_in_both_directions_to_the_last_one():
    with relay() as found, shouting_server() as behind:
        found.lead_to(behind)
        text = b"abc " * 500_000
        assert ask(found.port, text) == text.upper()


def test_a_connection_is_held_until_there_is_a_way_again():
    with (
        relay() as found,
        shouting_server() as behind,
        socket.create_connection(("127.0.0.1", found.port), timeout=SECONDS) as connection,
    ):
        connection.sendall(b"early")
        connection.shutdown(socket.SHUT_WR)
        found.lead_to(behind)
        assert read_all(connection) == b"EARLY"


def test_the_port_stays_when_what_is_behind_it_changes():
    with relay() as found:
        for _ in range(2):
            with shouting_server() as behind:
                found.lead_to(behind)
                assert ask(found.port, b"x") == b"X"
            found.hold()
        with pytest.raises(OSError):
            socket.create_server(("127.0.0.1", found.port))


def ends_without_a_byte(connection: socket.socket) -> bool:
    """By a reset, or by an end."""
    connection.settimeout(SECONDS)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_connection_that_finds_no_way_is_broken_off():
    with (
        relay(held_seconds=0.0) as found,
        socket.create_connection(("127.0.0.1", found.port), timeout=SECONDS) as connection,
    ):
        assert ends_without_a_byte(connection)


def test_there_is_no_waiting_where_there_is_no_way():
    with (
        relay() as found,
        socket.create_connection(("127.0.0.1", found.port), timeout=SECONDS) as waiting,
    ):
        found.break_off()
        assert ends_without_a_byte(waiting)
        with socket.create_connection(("127.0.0.1", found.port), timeout=SECONDS) as connection:
            assert ends_without_a_byte(connection)


def test_closed_it_lets_the_port_and_its_connections_go():
    with relay() as found:
        with socket.create_connection(("127.0.0.1", found.port), timeout=SECONDS) as held:
            found.close()
            assert ends_without_a_byte(held)
        found.close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", found.port), timeout=SECONDS)


def test_it_knows_for_how_long_nothing_came_back():
    with (
        relay() as found,
        shouting_server() as behind,
        socket.create_connection(("127.0.0.1", found.port), timeout=SECONDS) as connection,
    ):
        found.lead_to(behind)
        assert found.quiet_seconds() == 0.0, "nothing was asked"
        connection.sendall(b"early")
        eventually(lambda: found.quiet_seconds() >= 0.2)
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b"EARLY"
        assert found.quiet_seconds() == 0.0


def test_cut_it_ends_the_connections_that_stand():
    with (
        relay() as found,
        shouting_server() as behind,
        socket.create_connection(("127.0.0.1", found.port), timeout=SECONDS) as connection,
    ):
        found.lead_to(behind)
        connection.sendall(b"early")
        eventually(lambda: found.quiet_seconds() > 0.0)
        found.cut()
        assert ends_without_a_byte(connection)
        found.lead_to(behind)
        assert ask(found.port, b"again") == b"AGAIN"
