"""The code server of a stack: `python -m batch_assets.code_server start -s SOCKET …`, options as in `dagster`.

Dagster's code server is a proxy before a server of its own, which it starts as a process and starts anew when the code
is reloaded. Three things are added. That server's socket lies beside ours, in a folder that only our user may enter; by
default it lies in the folder of temporary files. And when that server is killed, the proxy ends too, so that it is
started again: otherwise it would answer every request with an error for ever (dagster/_grpc/proxy_server.py). The
server itself is ours too, for run workers that start sooner (`definitions_server.py`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

KILLED = (os.CLD_KILLED, os.CLD_DUMPED)
STEP_SECONDS = 1.0


def end_with_server() -> None:
    """Wait until a child is killed, then end this process. A child that ends by itself was replaced or has failed."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            ended = None
        if ended is not None and ended.si_code in KILLED:
            os._exit(1)
        time.sleep(STEP_SECONDS)  # none yet, or an ended one that Dagster has not collected yet


def main() -> None:
    """Serve until the end."""
    if "-s" in sys.argv:
        tempfile.tempdir = str(Path(sys.argv[sys.argv.index("-s") + 1]).parent)
    threading.Thread(target=end_with_server, name="code-server-watch", daemon=True).start()
    import dagster._grpc.server
    from dagster._cli.code_server import code_server_cli

    from batch_assets.definitions_server import entry_point

    dagster._grpc.server.get_python_environment_entry_point = entry_point
    code_server_cli()


if __name__ == "__main__":
    main()
