"""RunPod's REST API (version 1) within bounds: every request is sent once, and fails within some seconds."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from gpu_runner.bounded_http.addresses import NoRedirect
from gpu_runner.bounded_http.bounded_read import check_values
from gpu_runner.bounded_http.small_pages import read_page
from gpu_runner.providers.base import NoCapacity, ProviderError, ProviderUnclear

SECONDS = 4.0
LARGEST = 8 << 20  # bytes of an answer: some thousand pods
_NO_ROOM = ("no longer any instances", "no instances currently available", "not enough free gpus")
_THROTTLED = 429


@dataclass(frozen=True, slots=True)
class Answer:
    """Status 200 to 299, or 404, and the JSON of the body; None for an empty one."""

    status: int
    body: Any


class RunPodApi:
    """Calls the API with the key of the environment. Raises NoCapacity, ProviderError, ProviderUnclear."""

    def __init__(self, url: str, key_variable: str) -> None:
        self._url, self._key_variable = url, key_variable
        # Through a proxy of the environment where there is one; a redirect is not followed, the key goes nowhere else.
        self._opener = urllib.request.build_opener(NoRedirect())

    def call(self, method: str, path: str, body: object | None = None, seconds: float = SECONDS) -> Answer:
        """One request. A 404 is an answer: what is gone is gone."""
        request = urllib.request.Request(f"{self._url}{path}", method=method, headers=self._headers())
        if body is not None:
            request.data = json.dumps(body).encode()
        what, ends = f"{method} {path.partition('?')[0]}", time.monotonic() + seconds
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                return Answer(answer.status, _json(read_page(answer, LARGEST, max(0.1, ends - time.monotonic()))))
        except urllib.error.HTTPError as error:
            with error:
                return self._refused(what, error)
        except urllib.error.URLError as error:
            raise _unsent(what, error.reason) from None
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            raise ProviderUnclear(f"{what}: no whole answer: {type(error).__name__}") from None

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self._key_variable, "").strip()
        if not key or not key.isprintable():
            raise ProviderError(f"{self._key_variable}: expected RunPod's API key in this variable, found none")
        return {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "User-Agent": "batch-assets",
            "Accept-Encoding": "identity",
        }

    @staticmethod
    def _refused(what: str, error: urllib.error.HTTPError) -> Answer:
        """What a status other than 2xx means. The text decides between two kinds of no: RunPod has no code for it."""
        if error.code == 404:
            return Answer(404, None)
        text = _beginning(error)
        said = f"{what}: status {error.code}: {text}"
        if any(words in text.lower() for words in _NO_ROOM):
            raise NoCapacity(said)
        if error.code >= 500 or error.code == _THROTTLED or error.code < 400:
            raise ProviderUnclear(said)
        raise ProviderError(said)


def _unsent(what: str, reason: object) -> ProviderError | ProviderUnclear:
    """An error before the answer began: certain only where no connection came about."""
    before = isinstance(reason, ConnectionRefusedError | socket.gaierror | ssl.SSLCertVerificationError)
    words = f"{what}: {type(reason).__name__}"
    return ProviderError(f"{words}: not sent") if before else ProviderUnclear(f"{words}: no answer")


def _json(page: bytes) -> Any:
    if not page.strip():
        return None
    check_values(page, LARGEST)
    return json.loads(page)


def _beginning(error: urllib.error.HTTPError) -> str:
    try:
        page: bytes = error.read(2000)
    except (OSError, http.client.HTTPException):
        return ""
    return " ".join(page.decode(errors="replace").split())[:200]
