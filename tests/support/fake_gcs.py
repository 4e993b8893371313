"""Google Cloud Storage on loopback, as far as obstore asks its XML API: objects, conditions, ranges, lists, uploads of
many parts (https://cloud.google.com/storage/docs/xml-api/reference-methods).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from aiohttp import web

PAGE = 3  # objects of a page of a list
_DATE = format_datetime(datetime(2026, 11, 1, tzinfo=UTC), usegmt=True)


@dataclass
class FakeGcs:
    """`objects`: by bucket and name; `uploads`: parts of those that are not complete."""

    url: str = ""
    objects: dict[tuple[str, str], bytes] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def credentials(self, path: Path) -> Path:
        """A key file that leads here."""
        told = {"gcs_base_url": self.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        path.write_text(json.dumps(told | {"private_key_id": ""}))
        return path


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Handlers:
    def __init__(self, gcs: FakeGcs) -> None:
        self.gcs = gcs

    async def object(self, request: web.Request) -> web.StreamResponse:
        key = (request.match_info["bucket"], request.match_info["name"])
        if request.method == "PUT":
            return await self._put(request, key)
        if request.method == "POST":
            return await self._upload(request, key)
        with self.gcs.guard:
            data = self.gcs.objects.get(key)
            if request.method == "DELETE" and data is not None:
                del self.gcs.objects[key]
                return web.Response(status=204)
        if data is None:
            return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>")
        headers = {"ETag": _etag(data), "Last-Modified": _DATE, "x-goog-generation": "1", "Accept-Ranges": "bytes"}
        asked = request.http_range
        if asked.start is None and asked.stop is None:
            return web.Response(body=data, headers=headers)
        start, stop, _ = asked.indices(len(data))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return web.Response(status=206, body=data[start:stop], headers=headers)

    async def _put(self, request: web.Request, key: tuple[str, str]) -> web.Response:
        data = await request.read()
        if (number := request.query.get("partNumber")) is not None:
            self.gcs.uploads[request.query["uploadId"]][int(number)] = data
            return web.Response(headers={"ETag": _etag(data)})
        with self.gcs.guard:
            if request.headers.get("x-goog-if-generation-match") == "0" and key in self.gcs.objects:
                return web.Response(status=412, text="<Error><Code>PreconditionFailed</Code></Error>")
            self.gcs.objects[key] = data
        return web.Response(headers={"ETag": _etag(data), "x-goog-generation": "1"})

    async def _upload(self, request: web.Request, key: tuple[str, str]) -> web.Response:
        if "uploads" in request.query:
            number = str(len(self.gcs.uploads) + 1)
            self.gcs.uploads[number] = {}
            told = f"<UploadId>{number}</UploadId>"
            return web.Response(text=f"<InitiateMultipartUploadResult>{told}</InitiateMultipartUploadResult>")
        parts = self.gcs.uploads.pop(request.query["uploadId"])
        numbers = [int(one.text or 0) for one in ElementTree.fromstring(await request.text()).iter("PartNumber")]
        with self.gcs.guard:
            self.gcs.objects[key] = b"".join(parts[number] for number in numbers)
        told = f"<ETag>{escape(_etag(self.gcs.objects[key]))}</ETag>"
        return web.Response(text=f"<CompleteMultipartUploadResult>{told}</CompleteMultipartUploadResult>")

    async def list(self, request: web.Request) -> web.Response:
        bucket, query = request.match_info["bucket"], request.query
        prefix = query.get("prefix", "")
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        with self.gcs.guard:
            names = sorted(name for of, name in self.gcs.objects if of == bucket and name.startswith(prefix))
            found = [(name, self.gcs.objects[bucket, name]) for name in names if name > after]
        page, more = found[:PAGE], len(found) > PAGE
        told = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size><ETag>{escape(_etag(data))}</ETag>"
            "<LastModified>2026-11-01T00:00:00.000Z</LastModified></Contents>"
            for name, data in page
        )
        following = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if more else ""
        return web.Response(
            text=f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{following}{told}</ListBucketResult>",
            content_type="application/xml",
        )


@contextmanager
def fake_gcs() -> Iterator[FakeGcs]:
    """A server on a free port, in a thread of its own."""
    gcs, ready, loop = FakeGcs(), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        handlers, app = _Handlers(gcs), web.Application(client_max_size=1 << 30)
        app.router.add_get("/{bucket}", handlers.list)
        app.router.add_get("/{bucket}/", handlers.list)
        app.router.add_route("*", "/{bucket}/{name:.+}", handlers.object)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        gcs.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield gcs
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
