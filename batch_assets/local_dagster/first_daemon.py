"""The first daemon of a stack: a fork of its code server, so that Dagster is imported once for both.

`python -m batch_assets.local_dagster.first_daemon SOCKET MODULE OPTIONS …` stands for the daemon: the process that
waits at SOCKET gets its environment, options, standard output and error, and runs MODULE. When one of the two dies, the
other one ends at once; SIGTERM is passed on. Where nobody waits, this process becomes the daemon itself: the code
server could not fork, or the first daemon has ended. One that has lost its stand-in is waited for, because of two
daemons each would give a lost run a retry: a stand-in that gets no answer ends, and is started again by its owner.

Imports nothing but the standard library until it is known which process will be the daemon.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from batch_assets.local_dagster.forked_process import bound_socket, keep_only, order_for, take_order
from gpu_runner.providers.process_guard import die_with, name_process

NAME = "dagster-daemon"  # of the process, 15 bytes at most
ADDRESS = "daemon"  # of the socket, beside the code server's
APPEARS_SECONDS = 5.0  # until a code server that was just started listens
FORKS_SECONDS = 120.0  # until it has imported Dagster
STEP_SECONDS = 0.02
NUMBER_BYTES = 4
MOST_BYTES = 1 << 20  # of options and environment


def listen(folder: Path) -> socket.socket:
    """A socket in the code server's folder, for our user alone, at which the daemon's stand-in waits for the fork."""
    draft = folder / f"{ADDRESS}.new"
    listener = bound_socket(draft)
    draft.replace(folder / ADDRESS)  # who finds it can connect
    return listener


def fork(listener: socket.socket) -> int:
    """Fork the process that waits, and return its pid. It dies with this process, which must have one thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    prepare = die_with(os.getpid())
    pid = os.fork()
    if pid == 0:
        from batch_assets.dagster_internals.process_end import run_process  # the code server has it by now

        def serve() -> None:
            prepare()
            with contextlib.suppress(TimeoutError):  # nobody asks: the stand-in became the daemon itself
                _serve(listener)

        run_process(serve)
    return pid


def _serve(listener: socket.socket) -> None:
    """The forked process: be the daemon for the first that asks, if one does soon. The listener stays open, so that
    others wait."""
    keep_only(listener.fileno())
    name_process(NAME)
    listener.settimeout(FORKS_SECONDS)
    owner, _ = listener.accept()
    owner.settimeout(FORKS_SECONDS)
    size, streams, _, _ = socket.recv_fds(owner, NUMBER_BYTES, 2)
    told = _read(owner, int.from_bytes(size, "big"))
    if told is None or len(streams) != 2:
        return
    for target, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, target)
        os.close(stream)
    take_order(told)
    owner.sendall(os.getpid().to_bytes(NUMBER_BYTES, "big"))
    if not owner.recv(1):  # until signals are passed on
        return
    owner.settimeout(None)
    threading.Thread(target=_end_with, args=(owner,), name="daemon-owner", daemon=True).start()
    importlib.import_module(sys.argv[0]).main()


def _read(owner: socket.socket, size: int) -> bytes | None:
    """So many bytes; None when there are too many, or when the other end was closed before."""
    if not 0 < size <= MOST_BYTES:
        return None
    found = b""
    while len(found) < size:
        if not (some := owner.recv(size - len(found))):
            return None
        found += some
    return found


def _end_with(owner: socket.socket) -> None:
    """Die when the stand-in has died, as if this process had been killed in its place."""
    with contextlib.suppress(OSError):
        while owner.recv(1):
            pass
    os.kill(os.getpid(), signal.SIGKILL)


def _forked(owner: socket.socket, address: Path, module: str, options: list[str]) -> int:
    """Ask for the daemon; its pid, 0 where nobody waits. Raises OSError; TimeoutError where somebody does who does not
    answer."""
    deadline = time.monotonic() + APPEARS_SECONDS
    while not address.exists() and time.monotonic() < deadline:
        time.sleep(STEP_SECONDS)
    owner.settimeout(FORKS_SECONDS)
    owner.connect(str(address))
    order = order_for(module, options, os.environ)
    socket.send_fds(owner, [len(order).to_bytes(NUMBER_BYTES, "big")], [1, 2])
    owner.sendall(order)
    return int.from_bytes(owner.recv(NUMBER_BYTES), "big")


def main() -> None:
    """Stand for the daemon until it ends, or become it."""
    address, module, *options = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as owner:
        try:
            pid = _forked(owner, Path(address), module, options)
        except TimeoutError:
            sys.exit(f"no daemon answers at {address}; it is asked again, so that there are never two")
        except OSError:
            pid = 0
        if pid:
            owner.settimeout(None)

            def pass_on(number: int, _: object) -> None:
                with contextlib.suppress(ProcessLookupError):  # it has died already
                    os.kill(pid, number)

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, pass_on)
            with contextlib.suppress(OSError):  # it has died already
                owner.sendall(b"1")
                while owner.recv(1):
                    pass
            sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", module, *options])


if __name__ == "__main__":
    main()
