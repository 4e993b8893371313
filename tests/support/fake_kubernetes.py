"""A small API server of Kubernetes' shape on loopback, for tests without a cluster, and a provider on it.

It keeps pods and Secrets, lists and watches them by label, counts a quota, knows rights, and plays its faults. Of a
cluster it has no scheduler and no kubelet: a test says what becomes of a pod, with the states that a real one was seen
to report. Every answer has the clock of the tests' machine.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import email.utils
import http.server
import json
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gpu_runner.providers.kubernetes.config import KubernetesProviderConfig
from gpu_runner.providers.kubernetes.pod_watch import stop_watches
from gpu_runner.providers.kubernetes.provider import KubernetesProvider

Object = dict[str, Any]
TOKEN = "token-of-the-tests"
OFFER: Object = {"name": "h100", "gpu": "H100", "gpu_memory_gib": 80, "price_per_hour": 3.6, "boot_seconds": 1}


def stamp(seconds: float) -> str:
    """A time as the API writes it."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class FakeCluster:
    """What the API server knows. `fault` of method and path: an HTTP status, "hang", "cut", "lost" (done, no reply)."""

    pods: dict[str, Object] = field(default_factory=dict)
    secrets: dict[str, Object] = field(default_factory=dict)
    nodes: list[Object] = field(default_factory=list)
    quotas: list[Object] = field(default_factory=list)
    gpu_quota: int | None = None
    forbidden: set[tuple[str, str]] = field(default_factory=set)  # (verb, resource)
    policy: str = ""  # an admission plugin's refusal of every pod
    fault: Callable[[str, str], object] = lambda method, path: None
    ahead: float = 0.0  # of its clock
    streams: int = 0  # that are open
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self.guard = threading.RLock()
        self.stopped = threading.Event()
        self.version = 1000
        self.log: list[tuple[int, Object]] = []  # all events, with their versions
        self.watchers: list[tuple[str, queue.Queue[Object | None]]] = []

    def now(self) -> float:
        """Its clock."""
        return time.time() + self.ahead

    def tell(self, kind: str, pod: Object) -> None:
        """Give the pod a new version and tell it to those who watch."""
        with self.guard:
            self.version += 1
            pod["metadata"]["resourceVersion"] = str(self.version)
            event = {"type": kind, "object": copy.deepcopy(pod)}
            self.log.append((self.version, event))
            for selector, events in self.watchers:
                if selects(selector, pod):
                    events.put(event)

    def cut_watches(self) -> None:
        """End all streams without a word."""
        with self.guard:
            for _, events in self.watchers:
                events.put(None)

    def expire_watches(self) -> None:
        """What a watch hears whose version is too old."""
        with self.guard:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            for _, events in self.watchers:
                events.put({"type": "ERROR", "object": status})

    @property
    def watched(self) -> int:
        """How many streams are open."""
        return len(self.watchers)

    # what a kubelet and a scheduler would report

    def change(self, name: str, **status: Any) -> None:
        """Set parts of a pod's status."""
        with self.guard:
            self.pods[name]["status"].update(status)
            self.tell("MODIFIED", self.pods[name])

    def unschedulable(self, name: str, reason: str = "Unschedulable") -> None:
        self.change(name, phase="Pending", conditions=[self.condition("PodScheduled", "False", reason, "0/2 nodes")])

    def place(self, name: str, waiting: str = "ContainerCreating", message: str = "") -> None:
        """It has a node, and its container waits for this reason."""
        with self.guard:
            self.pods[name]["spec"]["nodeName"] = "node1"
            state = {"waiting": {"reason": waiting, "message": message}}
            self.change(name, phase="Pending", containerStatuses=[{"name": "engine", "state": state, "started": False}])

    def run(self, name: str, address: str = "127.0.0.1", *, answers: bool = True) -> None:
        with self.guard:
            self.pods[name]["spec"]["nodeName"] = "node1"
            state = {"running": {"startedAt": stamp(self.now())}}
            statuses = [{"name": "engine", "state": state, "started": answers, "ready": answers}]
            self.change(name, phase="Running", podIP=address, containerStatuses=statuses)

    def end(self, name: str, reason: str = "Error", exit_code: int = 1, **status: Any) -> None:
        """Its container ended."""
        ended = {"reason": reason, "exitCode": exit_code, "finishedAt": stamp(self.now())}
        statuses = [{"name": "engine", "state": {"terminated": ended}, "started": False}]
        self.change(name, phase="Failed", containerStatuses=statuses, **status)

    def disrupt(self, name: str, reason: str, grace: float = 30) -> None:
        """Drained, preempted or tainted: it is to go."""
        with self.guard:
            self.pods[name]["metadata"]["deletionTimestamp"] = stamp(self.now() + grace)
            self.change(name, conditions=[self.condition("DisruptionTarget", "True", reason, "")])

    def remove(self, name: str) -> None:
        """The object is gone, and what it owns."""
        with self.guard:
            pod = self.pods.pop(name)
            uid = pod["metadata"]["uid"]
            for key in [k for k, s in self.secrets.items() if s["metadata"]["ownerReferences"][0]["uid"] == uid]:
                del self.secrets[key]
            self.tell("DELETED", pod)

    def condition(self, kind: str, status: str, reason: str, message: str) -> Object:
        moment = stamp(self.now())
        return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": moment}


def selects(selector: str, found: Object) -> bool:
    """Whether a label selector of equalities takes the object."""
    marks = found["metadata"].get("labels", {})
    return all(marks.get(key) == value for key, _, value in (one.partition("=") for one in selector.split(",") if one))


class _Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: FakeCluster

    def log_message(self, *_: object) -> None: ...

    def date_time_string(self, timestamp: float | None = None) -> str:
        return email.utils.formatdate(self.cluster.now(), usegmt=True)

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        cluster, parts = self.cluster, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        method = "WATCH" if query.get("watch") else self.command
        cluster.asked.append((method, parts.path))
        fault = cluster.fault(method, parts.path)
        if fault == "hang":
            cluster.stopped.wait(60)
        if fault in ("hang", "cut"):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        try:
            if isinstance(fault, int):
                raise _Refused(fault, "InternalError", "a fault")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise _Refused(401, "Unauthorized", "Unauthorized")
            if method == "WATCH":
                self._watch(query)
                return
            if parts.path.endswith("/portforward"):
                self._open_stream(parts.path.split("/")[-2])
                return
            with cluster.guard:
                status, answer = self._answer(parts.path.strip("/").split("/"), query, body)
        except _Refused as error:
            status = error.status
            answer = {"kind": "Status", "reason": error.reason, "message": str(error), "code": status}
        if fault == "lost":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._send(status, answer)

    def _send(self, status: int, answer: Object) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _may(self, verb: str, resource: str) -> None:
        if (verb, resource) in self.cluster.forbidden:
            said = f'{resource} is forbidden: User "u" cannot {verb} resource "{resource}" in the namespace "engines"'
            raise _Refused(403, "Forbidden", said)

    def _answer(self, path: list[str], query: dict[str, str], body: Object) -> tuple[int, Object]:
        if path[0] == "apis":
            return self._review(body)
        if path[-1] == "nodes":
            self._may("list", "nodes")
            return 200, {"metadata": {"resourceVersion": "1"}, "items": self.cluster.nodes}
        if path[-2] == "nodes":
            self._may("get", "nodes")
            return 200, next(one for one in self.cluster.nodes if one["metadata"].get("name") == path[-1])
        resource, name = path[4], path[5] if len(path) > 5 else None
        if resource == "resourcequotas":
            self._may("list", resource)
            return 200, {"metadata": {}, "items": self.cluster.quotas}
        kept = self.cluster.pods if resource == "pods" else self.cluster.secrets
        verb = {"POST": "create", "DELETE": "delete"}.get(self.command, "get" if name else "list")
        self._may(verb, resource)
        if verb == "list":
            return 200, self._page(
                [one for one in kept.values() if selects(query.get("labelSelector", ""), one)], query
            )
        if verb == "create":
            return 201, self._create(resource, kept, body)
        if name not in kept:
            raise _Refused(404, "NotFound", f'{resource} "{name}" not found')
        return 200, self._delete(name, body) if verb == "delete" else kept[name]

    def _page(self, found: list[Object], query: dict[str, str]) -> Object:
        """Pages as the API has them; of two objects at most."""
        start, size = int(query.get("continue", 0)), min(2, int(query.get("limit", 2)))
        more = {"continue": str(start + size)} if start + size < len(found) else {}
        return {
            "metadata": {"resourceVersion": str(self.cluster.version), **more},
            "items": found[start : start + size],
        }

    def _create(self, resource: str, kept: dict[str, Object], body: Object) -> Object:
        cluster, name = self.cluster, body["metadata"]["name"]
        if name in kept:
            raise _Refused(409, "AlreadyExists", f'{resource} "{name}" already exists')
        if resource == "pods":
            if cluster.policy:
                raise _Refused(403, "Forbidden", f'pods "{name}" is forbidden: {cluster.policy}')
            used = sum(one["status"].get("phase") not in ("Failed", "Succeeded") for one in kept.values())
            if cluster.gpu_quota is not None and used >= cluster.gpu_quota:
                said = f"exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: {used}"
                raise _Refused(403, "Forbidden", f'pods "{name}" is forbidden: {said}, limited: {cluster.gpu_quota}')
            body["status"] = {"phase": "Pending"}
        body["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp(cluster.now())}
        kept[name] = body
        if resource == "pods":
            cluster.tell("ADDED", body)
        return body

    def _delete(self, name: str, body: Object) -> Object:
        cluster, pod = self.cluster, self.cluster.pods[name]
        if body.get("preconditions", {}).get("uid") not in (None, pod["metadata"]["uid"]):
            raise _Refused(409, "Conflict", "the UID in the precondition does not match")
        if pod["status"].get("phase") == "Running":
            pod["metadata"]["deletionTimestamp"] = stamp(cluster.now() + body.get("gracePeriodSeconds", 30))
            cluster.tell("MODIFIED", pod)
        else:
            cluster.remove(name)
        return pod

    def _open_stream(self, name: str) -> None:
        """A stream to the pod, which says nothing until the other end has closed it."""
        self._may("create", "pods/portforward")
        if name not in self.cluster.pods:
            raise _Refused(404, "NotFound", f'pods "{name}" not found')
        self.send_response(101)
        self.send_header("Connection", "Upgrade")
        self.send_header("Upgrade", self.headers["Upgrade"])
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        self.cluster.streams += 1
        self.connection.settimeout(30)
        with contextlib.suppress(OSError):
            self.connection.recv(1)
        self.cluster.streams -= 1

    def _review(self, body: Object) -> tuple[int, Object]:
        if body["kind"] == "SelfSubjectReview":
            return 201, {"status": {"userInfo": {"username": "tester"}}}
        asked = body["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        return 201, {"status": {"allowed": (asked["verb"], resource) not in self.cluster.forbidden}}

    def _left(self) -> bool:
        """Whether the client has closed its connection."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _watch(self, query: dict[str, str]) -> None:
        self._may("watch", "pods")
        events: queue.Queue[Object | None] = queue.Queue()
        entry = (query.get("labelSelector", ""), events)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        with self.cluster.guard:
            for version, event in self.cluster.log:
                if version > int(query["resourceVersion"]) and selects(entry[0], event["object"]):
                    events.put(event)
            self.cluster.watchers.append(entry)
        self.close_connection = True
        try:
            while not self.cluster.stopped.is_set():
                try:
                    event = events.get(timeout=0.05)
                except queue.Empty:
                    if self._left():
                        return
                    continue
                if event is None:
                    return
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        except OSError:
            pass
        finally:
            with self.cluster.guard:
                self.cluster.watchers.remove(entry)


@contextmanager
def fake_cluster() -> Iterator[FakeCluster]:
    """The API server, on a free port of loopback."""
    cluster = FakeCluster()
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    cluster.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield cluster
    finally:
        stop_watches()
        cluster.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


def write_kubeconfig(file: Path, server: str, token: str = TOKEN) -> Path:
    """Credentials for an API server without TLS."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    part = file.with_name(f"{file.name}-{uuid.uuid4().hex}")
    part.write_text(json.dumps(config))
    return part.replace(file)  # at once: others may be reading it


def pod_provider(home: Path, cluster: FakeCluster, **settings: Any) -> KubernetesProvider:
    """The provider `pods` on this API server. Each call opens it again."""
    file = write_kubeconfig(home / "kubeconfig", cluster.url, settings.pop("token", TOKEN))
    given = {
        "name": "pods",
        "namespace": "engines",
        "kubeconfig": file,
        "reach": "pod_ip",
        "offers": [OFFER],
        **settings,
    }
    return KubernetesProvider(home, KubernetesProviderConfig.model_validate(given))
