"""A hub on loopback that speaks the API of the Hugging Face hub, as far as datasets are pushed and read: repositories,
branches, trees, preupload, Git LFS (basic and multipart), commits, resolve with ranges. Private and gated repositories
are read with a token only; LFS objects come from another origin, to which resolve redirects. Its faults are what a test
says.

Protocol: huggingface_hub's client (`hf_api.py`, `lfs.py`, `_commit_api.py`) and
https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

TOKEN = "hf_of_a_test"
PAGE = 2  # files of a page of a tree
PART = 5 << 20  # bytes of a part of a multipart upload


@dataclass(frozen=True)
class Blob:
    """A file of a commit: its name in Git, its size, and its SHA-256 where it is an LFS object."""

    oid: str
    size: int
    lfs: str | None
    path: Path


@dataclass
class Repository:
    """Branches by name: each a list of commits (id, files), oldest first. `gated`: nobody's files are given."""

    private: bool
    gated: bool = False
    branches: dict[str, list[tuple[str, dict[str, Blob]]]] = field(default_factory=dict)

    def at(self, revision: str) -> tuple[str, dict[str, Blob]] | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((one for commits in self.branches.values() for one in commits if one[0] == revision), None)


Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class LocalHub:
    """`requests`: method and path of each; `uploaded`: LFS objects that were sent; `faults`: each is asked first, and
    may answer in the hub's place. `regular_bytes`: a file up to so large is no LFS object. `multipart`: LFS objects are
    sent in parts of PART bytes.
    """

    folder: Path
    url: str = ""
    regular_bytes: int = 1000
    multipart: bool = False
    requests: list[tuple[str, str]] = field(default_factory=list)
    uploaded: list[str] = field(default_factory=list)
    repositories: dict[str, Repository] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    tokens: set[str] = field(default_factory=lambda: {TOKEN})
    storage_url: str = ""
    served: list[tuple[str, str, bool]] = field(default_factory=list)  # by the storage: object, range, with a token

    def put(self, repo: str, files: dict[str, bytes], branch: str = "main", *, private: bool = False) -> str:
        """A commit that adds files to a branch, which is made where it is not; its id."""
        made = self.repositories.setdefault(repo, Repository(private))
        commits = made.branches.setdefault(branch, [("0" * 40, {})])
        there = dict(commits[-1][1])
        for name, data in files.items():
            digest = hashlib.sha256(data).hexdigest()
            self.blob(digest).write_bytes(data)
            lfs = digest if len(data) > self.regular_bytes else None
            there[name] = Blob(hashlib.sha1(data).hexdigest(), len(data), lfs, self.blob(digest))
        commit = hashlib.sha1(f"{commits[-1][0]} {sorted(there.items())}".encode()).hexdigest()
        commits.append((commit, there))
        return commit

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """What a reader of the branch sees."""
        found = self.repositories[repo].at(branch)
        assert found is not None
        return {name: blob.path.read_bytes() for name, blob in found[1].items()}

    def commits(self, repo: str, branch: str = "main") -> int:
        """How many commits the branch has beside that of its beginning."""
        return len(self.repositories[repo].branches[branch]) - 1

    def fail(self, where: str, status: int, times: int = 1, method: str = "", **headers: str) -> None:
        """Answer the next `times` requests whose path has `where` with a status; 0: cut the connection."""
        left = times

        async def fault(request: web.Request) -> web.StreamResponse | None:
            nonlocal left
            if not left or where not in request.path or method not in ("", request.method):
                return None
            left -= 1
            if status == 0:
                assert request.transport is not None
                request.transport.abort()
            return web.json_response({"error": "no"}, status=status or 500, headers=headers)

        self.faults.append(fault)

    def blob(self, sha256: str) -> Path:
        return self.folder / sha256


def _no_repo(status: int = 404) -> web.Response:
    return web.json_response({"error": "Repository not found"}, status=status, headers={"X-Error-Code": "RepoNotFound"})


class _Api:
    """The handlers."""

    def __init__(self, hub: LocalHub) -> None:
        self.hub = hub

    def routes(self) -> list[web.RouteDef]:
        repo = "/api/datasets/{org}/{name}"
        return [
            web.post("/api/repos/create", self.create),
            web.post("/api/validate-yaml", self.validate),
            web.get(repo, self.info),
            web.get(repo + "/revision/{revision:.+}", self.info),
            web.get(repo + "/tree/{revision}", self.tree),
            web.get(repo + "/tree/{revision}/{path:.+}", self.tree),
            web.post(repo + "/paths-info/{revision}", self.paths),
            web.post(repo + "/branch/{branch}", self.branch),
            web.post(repo + "/preupload/{revision}", self.preupload),
            web.post(repo + "/commit/{revision}", self.commit),
            web.post("/datasets/{org}/{name}.git/info/lfs/objects/batch", self.batch),
            web.put("/lfs/{oid}", self.put),
            web.put("/lfs/{oid}/{part}", self.put_part),
            web.post("/lfs/{oid}/complete", self.complete),
            web.post("/lfs/{oid}/verify", self.verify),
            web.get("/datasets/{org}/{name}/resolve/{revision}/{path:.+}", self.resolve),
            web.get("/storage/{oid}", self.storage),
        ]

    @web.middleware
    async def middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.hub.requests.append((request.method, request.path))
        for fault in self.hub.faults:
            if (answer := await fault(request)) is not None:
                return answer
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        ours = request.path.startswith(("/lfs/", "/storage/"))
        if not ours and token not in self.hub.tokens and (token or request.method not in ("GET", "HEAD")):
            headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return web.json_response({"error": headers["X-Error-Message"]}, status=401, headers=headers)
        found: web.StreamResponse = await handler(request)
        return found

    def _repo(self, request: web.Request) -> Repository | None:
        return self.hub.repositories.get(f"{request.match_info['org']}/{request.match_info['name']}")

    def _at(self, request: web.Request) -> tuple[str, dict[str, Blob]] | web.Response:
        repo = self._repo(request)
        if "Authorization" not in request.headers and (repo is None or repo.private):
            return _no_repo(401)  # nobody is told whether it is there
        if repo is None:
            return _no_repo()
        revision = request.match_info.get("revision", "main")
        found = repo.at(revision)
        code = {"X-Error-Code": "RevisionNotFound"}
        return found or web.json_response({"error": f"Invalid rev id: {revision}"}, status=404, headers=code)

    async def create(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repositories:
            return web.json_response({"error": "You already created this dataset repo"}, status=409)
        self.hub.repositories[name] = made = Repository(wanted.get("visibility") == "private")
        made.branches["main"] = [(hashlib.sha1(name.encode()).hexdigest(), {})]
        return web.json_response({"url": f"{self.hub.url}/datasets/{name}", "id": name, "name": name})

    async def validate(self, request: web.Request) -> web.Response:
        import yaml

        text = (await request.json())["content"]
        front = yaml.safe_load(text.split("---")[1])
        assert isinstance(front, dict) and front["configs"]
        return web.json_response({"errors": [], "warnings": []})

    async def info(self, request: web.Request) -> web.Response:
        found, repo = self._at(request), self._repo(request)
        if isinstance(found, web.Response) or repo is None:
            return found if isinstance(found, web.Response) else _no_repo()
        sha, files = found
        name = f"{request.match_info['org']}/{request.match_info['name']}"
        told = {"id": name, "_id": "1", "sha": sha, "private": repo.private, "gated": False, "disabled": False}
        told |= {"siblings": [{"rfilename": path} for path in sorted(files)], "tags": [], "downloads": 0, "likes": 0}
        return web.json_response(told)

    async def tree(self, request: web.Request) -> web.Response:
        found = self._at(request)
        if isinstance(found, web.Response):
            return found
        below = request.match_info.get("path", "").strip("/")
        files = {path: blob for path, blob in found[1].items() if not below or path.startswith(f"{below}/")}
        if below and not files:
            code = {"X-Error-Code": "EntryNotFound"}
            return web.json_response({"error": f"{below} does not exist"}, status=404, headers=code)
        entries: dict[str, dict[str, Any]] = {}
        for path, blob in sorted(files.items()):
            rest = path.removeprefix(f"{below}/") if below else path
            parts = rest.split("/")
            for depth in range(1, len(parts)):
                folder = "/".join([*([below] if below else []), *parts[:depth]])
                entries[folder] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": folder}
            if request.query.get("recursive", "").lower() in ("true", "1") or len(parts) == 1:
                entries[path] = _entry(path, blob)
        if request.query.get("recursive", "").lower() not in ("true", "1"):
            depth = below.count("/") + 1 if below else 0
            entries = {path: one for path, one in entries.items() if path.count("/") == depth}
        begin = int(request.query.get("cursor", 0))
        page, headers = list(entries.values())[begin : begin + PAGE], {}
        if begin + PAGE < len(entries):
            headers["Link"] = f'<{self.hub.url}{request.rel_url.update_query(cursor=str(begin + PAGE))}>; rel="next"'
        return web.json_response(page, headers=headers)

    async def paths(self, request: web.Request) -> web.Response:
        found = self._at(request)
        if isinstance(found, web.Response):
            return found
        asked = await (request.post() if "form" in request.content_type else request.json())
        wanted = asked.getall("paths") if hasattr(asked, "getall") else asked["paths"]
        wanted = [wanted] if isinstance(wanted, str) else wanted
        told = [_entry(path, found[1][path]) for path in wanted if path in found[1]]
        folders = [path for path in wanted if any(name.startswith(f"{path}/") for name in found[1])]
        told += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": path} for path in folders]
        return web.json_response(told)

    async def branch(self, request: web.Request) -> web.Response:
        repo = self._repo(request)
        assert repo is not None
        repo.branches.setdefault(request.match_info["branch"], [repo.branches["main"][0]])
        return web.json_response({})

    async def preupload(self, request: web.Request) -> web.Response:
        found = self._at(request)
        if isinstance(found, web.Response):
            return found
        told = []
        for one in (await request.json())["files"]:
            small = one["size"] <= self.hub.regular_bytes or one["path"].endswith(".md")
            mode = "regular" if small else "lfs"
            blob = found[1].get(one["path"])
            oid = None if blob is None else blob.lfs or blob.oid
            told.append({"path": one["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return web.json_response({"files": told})

    async def batch(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["operation"] == "upload" and asked["hash_algo"] == "sha256"
        told = []
        for one in asked["objects"]:
            oid, size = one["oid"], one["size"]
            answer: dict[str, Any] = {"oid": oid, "size": size}
            if not self.hub.blob(oid).exists():
                upload: dict[str, Any] = {"href": f"{self.hub.url}/lfs/{oid}", "header": {}}
                if self.hub.multipart and size > PART:
                    parts = range(1, -(-size // PART) + 1)
                    upload = {"href": f"{self.hub.url}/lfs/{oid}/complete", "header": {"chunk_size": str(PART)}}
                    upload["header"] |= {str(part): f"{self.hub.url}/lfs/{oid}/{part}" for part in parts}
                verify = {"href": f"{self.hub.url}/lfs/{oid}/verify", "header": {}}
                answer["actions"] = {"upload": upload, "verify": verify}
            told.append(answer)
        return web.json_response({"transfer": "basic", "objects": told})

    async def put(self, request: web.Request) -> web.Response:
        await self._keep(request, request.match_info["oid"])
        return web.Response()

    async def put_part(self, request: web.Request) -> web.Response:
        digest = await _received(request, self.hub.folder / f"{request.match_info['oid']}.{request.match_info['part']}")
        return web.Response(headers={"ETag": f'"{digest}"'})

    async def complete(self, request: web.Request) -> web.Response:
        oid, parts = request.match_info["oid"], (await request.json())["parts"]
        digest, whole = hashlib.sha256(), self.hub.folder / f"{oid}.whole"
        with whole.open("wb") as file:
            for one in parts:
                data = (self.hub.folder / f"{oid}.{one['partNumber']}").read_bytes()
                assert one["etag"].strip('"') == hashlib.sha256(data).hexdigest()
                digest.update(data)
                file.write(data)
        assert digest.hexdigest() == oid
        whole.rename(self.hub.blob(oid))
        self.hub.uploaded.append(oid)
        return web.json_response({})

    async def _keep(self, request: web.Request, oid: str) -> None:
        partial = self.hub.folder / f"{oid}.partial"
        if await _received(request, partial) == oid:  # what was cut on the way is not kept
            partial.rename(self.hub.blob(oid))
            self.hub.uploaded.append(oid)

    async def verify(self, request: web.Request) -> web.Response:
        asked = await request.json()
        blob = self.hub.blob(asked["oid"])
        there = blob.exists() and blob.stat().st_size == asked["size"]
        return web.json_response({}, status=200 if there else 404)

    async def commit(self, request: web.Request) -> web.Response:
        repo, found = self._repo(request), self._at(request)
        if isinstance(found, web.Response) or repo is None:
            return found if isinstance(found, web.Response) else _no_repo()
        branch, (head, files) = request.match_info["revision"], found
        files = dict(files)
        for line in (await request.read()).splitlines():
            one = json.loads(line)
            kind, value = one["key"], one["value"]
            if kind == "header":
                if value.get("parentCommit", head) != head:
                    return web.json_response({"error": "The branch has moved"}, status=412)
            elif kind == "file":
                data = base64.b64decode(value["content"])
                oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                path = self.hub.folder / f"git-{oid}"
                path.write_bytes(data)
                files[value["path"]] = Blob(oid, len(data), None, path)
            elif kind == "lfsFile":
                blob = self.hub.blob(value["oid"])
                if not blob.exists():
                    return web.json_response({"error": "LFS pointer to an object that is not there"}, status=400)
                pointer = hashlib.sha1(value["oid"].encode()).hexdigest()
                files[value["path"]] = Blob(pointer, blob.stat().st_size, value["oid"], blob)
            else:
                assert kind == "deletedFile"
                del files[value["path"]]
        sha = hashlib.sha1(f"{head} {sorted((path, blob.oid) for path, blob in files.items())}".encode()).hexdigest()
        repo.branches[branch].append((sha, files))
        url = f"{self.hub.url}/datasets/{request.match_info['org']}/{request.match_info['name']}/commit/{sha}"
        return web.json_response({"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    async def resolve(self, request: web.Request) -> web.StreamResponse:
        found = self._at(request)
        if isinstance(found, web.Response):
            return found
        sha, files = found
        repo = self._repo(request)
        if repo is not None and repo.gated:
            return web.json_response({"error": "Gated"}, status=403, headers={"X-Error-Code": "GatedRepo"})
        blob = files.get(request.match_info["path"])
        if blob is None:
            code = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
            return web.json_response({"error": "Entry not found"}, status=404, headers=code)
        etag = blob.lfs or blob.oid
        headers = {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "X-Linked-Etag": f'"{etag}"'}
        headers["X-Linked-Size"] = str(blob.size)
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(blob.size), "Accept-Ranges": "bytes"})
        if blob.lfs is not None:
            headers["Location"] = f"{self.hub.storage_url}/storage/{blob.lfs}?signature=of-a-test"
            return web.Response(status=302, headers=headers)
        return web.FileResponse(blob.path, headers=headers)

    async def storage(self, request: web.Request) -> web.StreamResponse:
        """Another origin, which knows no token: whoever has the address may read."""
        oid, asked = request.match_info["oid"], request.headers.get("Range", "")
        self.hub.served.append((oid, asked, "Authorization" in request.headers))
        return web.FileResponse(self.hub.blob(oid))


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    told: dict[str, Any] = {"type": "file", "oid": blob.oid, "size": blob.size, "path": path}
    if blob.lfs is not None:
        told["lfs"] = {"oid": blob.lfs, "size": blob.size, "pointerSize": 134}
    return told


async def _received(request: web.Request, path: Path) -> str:
    """The body in a file; its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        async for block in request.content.iter_chunked(1 << 20):
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


@contextmanager
def local_hub(folder: Path) -> Iterator[LocalHub]:
    """A hub on a free port, in a thread of its own. Its client is online, whatever a test before had it import with."""
    folder.mkdir(parents=True, exist_ok=True)
    hub, ready, loop = LocalHub(folder), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        api = _Api(hub)
        app = web.Application(middlewares=[api.middleware], client_max_size=1 << 30)
        app.add_routes(api.routes())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        hub.url, hub.storage_url = (f"http://127.0.0.1:{address[1]}" for address in runner.addresses)
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # read from the environment once
            yield hub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
