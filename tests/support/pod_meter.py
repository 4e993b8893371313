"""How long each engine pod was there, as the API server showed it to its administrator: independent of the books."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

LOOK_SECONDS = 0.25
ANSWER_SECONDS = 5.0


@dataclass
class PodLife:
    """Unix seconds of this machine: first seen, and when its containers had ended or it was gone. None: not yet."""

    name: str
    began: float
    ended: float | None = None
    node: str = ""

    @property
    def seconds(self) -> float:
        return (time.time() if self.ended is None else self.ended) - self.began


class PodMeter:
    """Looks at the pods of a namespace four times a second. What it cannot see, it does not change."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        given = yaml.safe_load(kubeconfig.read_text())
        cluster, user = given["clusters"][0]["cluster"], given["users"][0]["user"]
        self._address = urlsplit(cluster["server"]).netloc
        self._trust = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._trust.load_cert_chain(user["client-certificate"], user["client-key"])
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._over = threading.Event()
        self.lives: dict[str, PodLife] = {}  # by uid

    def total_seconds(self) -> float:
        """Of all pods there ever were."""
        return sum(life.seconds for life in self.lives.values())

    def standing(self) -> list[str]:
        """Names of the pods that are there."""
        return sorted(life.name for life in self.lives.values() if life.ended is None)

    @contextmanager
    def running(self) -> Iterator[PodMeter]:
        thread = threading.Thread(target=self._run, name="pod-meter", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join(2 * ANSWER_SECONDS)

    def _run(self) -> None:
        connection = http.client.HTTPSConnection(self._address, timeout=ANSWER_SECONDS, context=self._trust)
        while not self._over.wait(LOOK_SECONDS):
            try:
                connection.request("GET", self._path)
                answer = connection.getresponse()
                body = answer.read()
                if answer.status == 200:
                    self._take(json.loads(body)["items"], time.time())
            except (OSError, http.client.HTTPException, ValueError):
                connection.close()  # the next request opens it again
        connection.close()

    def _take(self, pods: list[dict[str, Any]], now: float) -> None:
        seen = {pod["metadata"]["uid"]: pod for pod in pods}
        for uid, pod in seen.items():
            life = self.lives.setdefault(uid, PodLife(pod["metadata"]["name"], now))
            life.node = pod["spec"].get("nodeName", "")
            if life.ended is None and pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
                life.ended = now
        for uid, life in self.lives.items():
            if uid not in seen and life.ended is None:
                life.ended = now
