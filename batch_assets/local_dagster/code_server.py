"""The code server: `python -m batch_assets.local_dagster.code_server start -s SOCKET …`, options as in `dagster`.

Dagster's code server is a proxy before a server of its own, which it starts as a process and starts anew when the code
is reloaded. Five things are added. That server is ours, which forks its run workers (definitions_server.py). The
first one is a fork of this process, so that Dagster is imported once for both (first_server.py), and so is the first
daemon of the stack (first_daemon.py). Its
socket lies beside ours, in a folder that only our user may enter; by default it lies in the folder of temporary files.
And when that server is killed, the proxy ends too, so that it is started again: otherwise it would answer every request
with an error for ever (dagster/_grpc/proxy_server.py).
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from batch_assets.dagster_internals.code_server import serve_definitions_by
from batch_assets.dagster_internals.process_end import run_process
from batch_assets.local_dagster import definitions_server, first_daemon, first_server, worker_template
from batch_assets.local_dagster.first_server import FirstServer
from batch_assets.local_dagster.worker_template import TemplateError

KILLED = (os.CLD_KILLED, os.CLD_DUMPED)
STEP_SECONDS = 1.0


def end_with_server(daemon: int | None) -> None:
    """Wait until a server is killed, then end this process. One that ends by itself was replaced or has failed.

    `daemon`: process id of a child that is none.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            ended = None
        if ended is not None and ended.si_pid == daemon:
            os.waitpid(daemon, 0)
            daemon = None  # another process may get its number
            continue
        if ended is not None and ended.si_code in KILLED:
            os._exit(1)
        time.sleep(STEP_SECONDS)  # none yet, or an ended one that Dagster has not collected yet


def main() -> None:
    """Serve until the end."""
    listener = None
    if "-s" in sys.argv:
        folder = Path(sys.argv[sys.argv.index("-s") + 1]).parent
        tempfile.tempdir = str(folder)
        listener = first_daemon.listen(folder)
    first: FirstServer | None = None
    daemon: int | None = None
    try:
        worker_template.import_modules()
        first = first_server.fork(definitions_server.main)
        daemon = first_daemon.fork(listener) if listener else None
    except TemplateError as error:  # another build of a library starts threads, say: slower, and no reason to stop
        sys.stderr.write(f"the server of definitions is started from nothing: {error}\n")
    if listener:
        listener.close()
    threading.Thread(target=end_with_server, args=(daemon,), name="code-server-watch", daemon=True).start()
    from batch_assets.dagster_internals import run_code_server_command

    serve_definitions_by("batch_assets.local_dagster.definitions_server", first)
    run_code_server_command()


if __name__ == "__main__":
    run_process(main)
