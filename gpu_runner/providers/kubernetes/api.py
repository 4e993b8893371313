"""The API server: credentials of the official client, requests with bounds, and its answers as typed errors.

The client's own calls repeat a request three times unasked and read answers of any size, so requests are made here on
its connection pool. Blocking; for several threads.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlencode

from gpu_runner.providers.base import NoCapacity, ProviderError, ProviderUnclear

if TYPE_CHECKING:
    import urllib3
    from kubernetes.client import ApiClient

CONNECT_SECONDS, READ_SECONDS = 2.0, 4.0
LARGEST_ANSWER = 64 << 20  # a pod is about 10 kB
LARGEST_LINE = 4 << 20
LARGEST_ERROR = 64 << 10
PART = 1 << 16
PAGE = 500
MOST_PAGES = 200
SWITCHING_PROTOCOLS = 101
IN_CLUSTER_VARIABLE = "KUBERNETES_SERVICE_HOST"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verb:
    """A right, as RBAC has it."""

    verb: str
    resource: str
    group: str = ""
    subresource: str = ""

    @property
    def name(self) -> str:
        """The resource with its subresource."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource

    def __str__(self) -> str:
        return f"{self.verb} {self.name}"


class ClusterAddress(Protocol):
    """How a cluster is reached, and as what it is called in messages. Without kubeconfig and context, in a pod: by its
    service account."""

    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def kubeconfig(self) -> Path | None: ...
    @property
    def context(self) -> str | None: ...


class ApiRefused(Exception):
    """The API server answered, and not with success. `status`: of HTTP; `reason`: of Kubernetes' Status object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message


class ApiAway(Exception):
    """No answer, or half of one: the request may or may not have taken effect."""


class CredentialsError(Exception):
    """The kubeconfig or service account cannot be used; nothing was asked."""


def inside(config: ClusterAddress) -> bool:
    """Whether the service account of the pod that we run in is used."""
    return config.kubeconfig is None and config.context is None and bool(os.environ.get(IN_CLUSTER_VARIABLE))


class ClusterApi:
    """The API server of one cluster, and its clock."""

    def __init__(self, config: ClusterAddress, clock: Callable[[], float] = time.time) -> None:
        self.namespace = config.namespace
        self._config, self._clock = config, clock
        self._client: ApiClient | None = None
        self._guard = threading.Lock()
        self._ahead = 0.0  # seconds that the API server's clock is ahead of ours

    def now(self) -> float:
        """Unix seconds by the API server's clock, as of its last answer; to about a second."""
        return self._clock() + self._ahead

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        """Read one object. Raises ApiRefused, ApiAway, CredentialsError, as all that follow."""
        return self._ask("GET", path, query=query)

    def create(self, path: str, body: Json) -> Json:
        """POST an object."""
        return self._ask("POST", path, body=body)

    def delete(self, path: str, body: Json) -> Json:
        """DELETE an object; `body` is a DeleteOptions."""
        return self._ask("DELETE", path, body=body)

    def items(self, path: str, query: Mapping[str, str] | None = None) -> tuple[list[Json], str]:
        """All objects of a list, page by page, and the version from which a watch goes on."""
        found: list[Json] = []
        step = {**(query or {}), "limit": str(PAGE)}
        for _ in range(MOST_PAGES):
            page = self._ask("GET", path, query=step)
            found += page.get("items") or ()
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return found, str(metadata.get("resourceVersion", ""))
            step["continue"] = str(metadata["continue"])
        raise ApiAway(f"its list has more than {PAGE * MOST_PAGES:,} objects")

    def watch(self, path: str, query: Mapping[str, str], version: str, seconds: int) -> Generator[Json, None, None]:
        """Events from a version on, until the API server ends the stream after `seconds`; closing it ends it, too."""
        asked = {**query, "watch": "true", "resourceVersion": version, "timeoutSeconds": str(seconds)}
        asked["allowWatchBookmarks"] = "true"
        with self._sent("GET", path, asked, None, seconds + READ_SECONDS) as answer:
            rest = b""
            for part in answer.stream(PART, decode_content=True):
                *lines, rest = (rest + part).split(b"\n")
                if len(rest) > LARGEST_LINE:
                    raise ApiAway(f"an event is longer than {LARGEST_LINE:,} bytes")
                yield from (_json(line) for line in lines if line.strip())

    def stream_status(self, path: str, query: Mapping[str, str], headers: Mapping[str, str], seconds: float) -> int:
        """HTTP status of the answer to a POST that asks for a stream, which is ended at once; 101: it was granted."""
        try:
            with self._sent("POST", path, query, None, seconds, headers) as answer:
                answer.close()  # what is said on this connection now is no HTTP
                return answer.status
        except ApiRefused as error:
            return error.status

    def allowed(self, right: Verb) -> bool:
        """Whether we may do this in the namespace (SelfSubjectAccessReview)."""
        spec = {"namespace": self.namespace, "verb": right.verb, "resource": right.resource, "group": right.group}
        if right.subresource:
            spec["subresource"] = right.subresource
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": spec},
        }
        answer = self.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        return bool((answer.get("status") or {}).get("allowed"))

    def failure(self, error: Exception, doing: Verb) -> ProviderError | ProviderUnclear:
        """The error of a call as the fleet knows it: no capacity, no (with the missing right), or no answer."""
        where = f"{self._config.name}: namespace {self.namespace}: {doing}"
        if isinstance(error, CredentialsError):
            return ProviderError(f"{self._config.name}: {error}")
        if not isinstance(error, ApiRefused):
            return ProviderUnclear(f"{where}: the API server does not answer: {error}")
        if error.status >= 500:
            return ProviderUnclear(f"{where}: the API server says {error.status} {error.reason}: {error.message}")
        if error.status == 401:
            return ProviderError(f"{where}: the API server does not accept the credentials (401)")
        if error.status == 403:
            return self._forbidden(error, doing, where)
        return ProviderError(f"{where}: {error.status} {error.reason}: {error.message}")

    def _forbidden(self, error: ApiRefused, doing: Verb, where: str) -> ProviderError:
        """403 is a missing right, a full quota or a policy. The right can be asked for; the two others differ in words.

        The words are those of Kubernetes' plugin/pkg/admission/resourcequota; its Status object says the same of both.
        """
        with contextlib.suppress(ApiRefused, ApiAway, CredentialsError):
            if not self.allowed(doing):
                return ProviderError(f"{where}: not allowed: give its account the verb {doing.verb} on {doing.name}")
        if "exceeded quota:" in error.message:
            return NoCapacity(f"{where}: {error.message}")
        return ProviderError(f"{where}: {error.message}")

    def client(self) -> ApiClient:
        """The official client with our credentials. Raises CredentialsError."""
        with self._guard:
            if self._client is None:
                self._client = _connect(self._config)
            return self._client

    def _ask(self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Json | None = None) -> Json:
        with self._sent(method, path, query or {}, body, READ_SECONDS) as answer:
            deadline = time.monotonic() + 2 * READ_SECONDS
            read = bytearray()
            for part in answer.stream(PART, decode_content=True):
                read += part
                if len(read) > LARGEST_ANSWER or time.monotonic() > deadline:
                    raise ApiAway(f"its answer to {method} is too long or too slow")
            return _json(bytes(read))

    @contextlib.contextmanager
    def _sent(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None,
        read_seconds: float,
        more_headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """An answer of success, not read yet."""
        client = self.client()
        import urllib3

        url = f"{client.configuration.host}{quote(path)}" + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json", "User-Agent": "batch-assets", **more_headers}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            client.update_params_for_auth(headers, [], ["BearerToken"])
            answer = client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=read_seconds),
                preload_content=False,
                redirect=False,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise ApiAway(_plain(error)) from error
        try:
            self._set_clock(answer.headers.get("Date"))
            if answer.status == 401:  # the kubeconfig may have been renewed: it is read again at the next call
                self._client = None
            if not 200 <= answer.status < 300 and answer.status != SWITCHING_PROTOCOLS:
                raise _refusal(answer)
            yield answer
            answer.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise ApiAway(_plain(error)) from error
        finally:
            answer.close()

    def _set_clock(self, date: str | None) -> None:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if date:
                ahead = email.utils.parsedate_to_datetime(date).timestamp() + 0.5 - self._clock()
                self._ahead = ahead if abs(ahead) > 2.0 else 0.0  # the header has whole seconds


def _json(text: bytes) -> Json:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ApiAway("its answer is no JSON") from error
    if not isinstance(found, dict):
        raise ApiAway("its answer is no JSON object")
    return found


def _refusal(answer: urllib3.BaseHTTPResponse) -> ApiRefused:
    try:
        status = _json(answer.read(LARGEST_ERROR, decode_content=True))
    except ApiAway:
        status = {}
    message = str(status.get("message", ""))[:500]
    return ApiRefused(answer.status, str(status.get("reason", "")), message)


def _plain(error: BaseException) -> str:
    """The kind of an error of urllib3, without the objects in its text."""
    return f"{type(error).__name__}: {str(error).rpartition('>: ')[2]}"[:200]


def _connect(config: ClusterAddress) -> ApiClient:
    try:
        from kubernetes import client
        from kubernetes import config as credentials
    except ImportError as error:
        raise CredentialsError(f"expected the package kubernetes: {error}") from error

    found = client.Configuration()
    try:
        if inside(config):
            credentials.load_incluster_config(client_configuration=found)
        else:
            file = None if config.kubeconfig is None else str(config.kubeconfig.expanduser())
            credentials.load_kube_config(file, context=config.context, client_configuration=found, persist_config=False)
    except Exception as error:  # the loader lets through what YAML, the file system and credential helpers raise
        where = config.kubeconfig or ("service account" if inside(config) else "kubeconfig")
        raise CredentialsError(f"{where}: {type(error).__name__}: {str(error)[:200]}") from error
    found.connection_pool_maxsize = 8
    return client.ApiClient(found)
