"""An S3 server in this process, whose conditional writes hold between threads."""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def local_s3() -> Iterator[str]:
    """Yields its address. moto looks for an object and writes it without a lock, so that two of several writers with
    `If-None-Match: *` can both win, which S3 rules out: here its writes follow one another."""
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    writes, unlocked = threading.Lock(), S3Response.put_object

    def put_object(response: S3Response) -> Any:
        with writes:
            return unlocked(response)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", put_object)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        try:
            yield f"http://{host}:{port}"
        finally:
            server.stop()
