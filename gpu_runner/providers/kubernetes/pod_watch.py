"""One copy of all pods of a provider for the whole process: listed, then watched, and listed again every 30 seconds.

Watches lose events and end without a word, so the copy is only what is known between two lists; whoever needs the
truth of this moment calls `refresh`. What is gone is remembered with its last state for an hour: an evicted pod leaves
nothing else behind. The thread ends when nobody has asked for two minutes, and starts again with the next question.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpu_runner.providers.kubernetes.api import ApiAway, ApiRefused, ClusterApi, CredentialsError
from gpu_runner.providers.kubernetes.config import KubernetesProviderConfig
from gpu_runner.providers.kubernetes.manifests import selector
from gpu_runner.providers.kubernetes.node_health import NodeHealth
from gpu_runner.providers.kubernetes.node_prices import NodePrices
from gpu_runner.providers.kubernetes.pod_status import PodState, read_pod, vanished

WATCH_SECONDS = 30
IDLE_SECONDS = 120.0
KEEP_SECONDS, KEEP_MOST = 3600.0, 1000
WAITS = (0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A pod, and when (monotonic) it was heard of."""

    pod: PodState
    heard_at: float


class PodCopy:
    """The pods as they were last heard of. For several threads; no network.

    A list that was asked for before an event arrived is older than the event: it neither brings back a deleted pod nor
    takes away a new one.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._pods: dict[str, _Kept] = {}
        self._gone: dict[str, _Kept] = {}  # by name; their pods have an end
        self._gone_uids: dict[str, None] = {}  # in the order in which they went
        self._ended_by_us: dict[str, None] = {}

    def find(self, name: str) -> PodState | None:
        """The pod of this name, or what was known of it at its end."""
        with self._guard:
            kept = self._pods.get(name) or self._gone.get(name)
            return None if kept is None else kept.pod

    def all(self) -> list[PodState]:
        """All pods by name, those that are gone as well."""
        with self._guard:
            horizon = time.monotonic() - KEEP_SECONDS
            for name in [name for name, kept in self._gone.items() if kept.heard_at < horizon]:
                del self._gone[name]
            return [kept.pod for _, kept in sorted({**self._gone, **self._pods}.items())]

    def ended_by_us(self, uid: str) -> bool:
        """Whether this process had it deleted."""
        with self._guard:
            return uid in self._ended_by_us

    def ends_by_us(self, uid: str) -> None:
        """This process is about to delete it."""
        with self._guard:
            _remember(self._ended_by_us, uid)

    def lives_on(self, uid: str) -> None:
        """Tell that the pod was not deleted after all."""
        with self._guard:
            self._ended_by_us.pop(uid, None)

    def put(self, pod: PodState, asked_at: float) -> None:
        """Take in a pod from an answer to what was asked at `asked_at` (monotonic)."""
        with self._guard:
            self._put(pod, asked_at)

    def replace(self, pods: list[PodState], asked_at: float, now: float) -> None:
        """Take in a whole list that was asked for at `asked_at`; `now`: the cluster's time."""
        with self._guard:
            listed = {pod.name for pod in pods}
            for name, kept in list(self._pods.items()):
                if name not in listed and kept.heard_at < asked_at:
                    self._lose(kept.pod, now)
            for pod in pods:
                self._put(pod, asked_at)

    def event(self, kind: str, pod: PodState, now: float) -> None:
        """Take in an event of a watch: ADDED, MODIFIED or DELETED."""
        with self._guard:
            self._put(pod, time.monotonic())
            if kind == "DELETED":
                self._lose(pod, now)

    def _put(self, pod: PodState, asked_at: float) -> None:
        kept = self._pods.get(pod.name)
        if pod.uid in self._gone_uids or (kept is not None and kept.heard_at > asked_at):
            return
        self._pods[pod.name] = _Kept(pod, asked_at)

    def _lose(self, pod: PodState, now: float) -> None:
        if pod.uid in self._gone_uids:
            return
        end = vanished(pod, now, by_us=pod.uid in self._ended_by_us)
        self._gone[pod.name] = _Kept(replace(pod, end=end), time.monotonic())
        self._pods.pop(pod.name, None)
        _remember(self._gone_uids, pod.uid)
        while len(self._gone) > KEEP_MOST:
            del self._gone[next(iter(self._gone))]


def _remember(uids: dict[str, None], uid: str) -> None:
    uids[uid] = None
    while len(uids) > KEEP_MOST:
        del uids[next(iter(uids))]


class PodWatch:
    """Keeps a PodCopy current while somebody asks."""

    def __init__(self, config: KubernetesProviderConfig) -> None:
        self.api = ClusterApi(config)
        self.copy = PodCopy()
        self.nodes = NodeHealth(self.api)
        self.prices = NodePrices(self.api)
        self.path = f"/api/v1/namespaces/{config.namespace}/pods"
        self.trouble = ""  # why the copy is not current; "": it is
        self._query = {"labelSelector": selector(config.name)}
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asked_at = 0.0

    def refresh(self) -> str:
        """List now; returns the version. Raises ApiRefused, ApiAway, CredentialsError."""
        asked_at = time.monotonic()
        items, version = self.api.items(self.path, self._query)
        self.copy.replace([pod for pod in map(_read, items) if pod is not None], asked_at, self.api.now())
        return version

    def follow(self) -> None:
        """Keep the copy current from now on, in a thread of its own."""
        with self._guard:
            self._asked_at = time.monotonic()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="pods", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Nobody asks any more: the thread ends when its stream does."""
        self._asked_at = -math.inf

    def _wanted(self) -> bool:
        return time.monotonic() - self._asked_at < IDLE_SECONDS

    def _run(self) -> None:
        failures = 0
        while self._wanted():
            try:
                version = self.refresh()
                self.trouble, failures = "", 0
                self._take_events(version)
            except (ApiRefused, ApiAway, CredentialsError) as error:
                self.trouble = str(error) or type(error).__name__
                time.sleep(WAITS[min(failures, len(WAITS) - 1)])
                failures += 1

    def _take_events(self, version: str) -> None:
        with contextlib.closing(self.api.watch(self.path, self._query, version, WATCH_SECONDS)) as events:
            for event in events:
                self._take(event)
                if not self._wanted():
                    return

    def _take(self, event: Mapping[str, Any]) -> None:
        if event.get("type") == "ERROR":
            status = event.get("object") or {}
            raise ApiRefused(int(status.get("code") or 0), str(status.get("reason")), str(status.get("message")))
        if event.get("type") in ("ADDED", "MODIFIED", "DELETED") and (pod := _read(event.get("object") or {})):
            self.copy.event(event["type"], pod, self.api.now())


def _read(pod: Mapping[str, Any]) -> PodState | None:
    try:
        return read_pod(pod)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # not a pod as Kubernetes has them: what else is listed still counts


_shared: dict[tuple[str, ...], PodWatch] = {}
_shared_guard = threading.Lock()


def shared_watch(config: KubernetesProviderConfig) -> PodWatch:
    """The one watch of this process for the pods of this provider. Providers are made anew for every question."""
    key = (str(config.kubeconfig), str(config.context), config.namespace, config.name)
    with _shared_guard:
        return _shared.setdefault(key, PodWatch(config))


def stop_watches() -> None:
    """End all watches of this process; the next question starts its own again."""
    with _shared_guard:
        for watch in _shared.values():
            watch.stop()
        _shared.clear()


def _forget() -> None:
    """After a fork: threads and connections are the parent's."""
    global _shared_guard
    _shared_guard = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_forget)
