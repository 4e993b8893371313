"""EC2's API within bounds: each call is sent once, and fails within some seconds, as one of three errors.

botocore repeats a request by itself and then shows the last answer only: a lost order followed by a refusal would look
like a refusal. So nothing is repeated here; the fleet does, with the same token. What is certain and what is not was
measured against a server that fails in every way (botocore 1.44).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import boto3
import botocore.exceptions as failures
from botocore.config import Config
from botocore.parsers import ResponseParserError

from gpu_runner.providers.base import NoCapacity, ProviderError, ProviderUnclear

CONNECT_SECONDS, READ_SECONDS = 1.0, 3.0
MISMATCH = "IdempotentParameterMismatch"
NOT_FOUND = "InvalidInstanceID.NotFound"
DRY_RUN = "DryRunOperation"

NO_CAPACITY = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientReservedInstanceCapacity",
        "SpotMaxPriceTooLow",
        "MaxSpotInstanceCountExceeded",
        "VcpuLimitExceeded",
        "InstanceLimitExceeded",
        "Unsupported",  # this zone has no such instance type
    }
)
# Throttled: refused as such, but EC2 also answers so when it was slow to take an order.
_THROTTLED = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled", "SlowDown"})
_NEVER_SENT = (
    failures.EndpointConnectionError,
    failures.ConnectTimeoutError,
    failures.ProxyConnectionError,
    failures.NoCredentialsError,
    failures.PartialCredentialsError,
    failures.CredentialRetrievalError,
    failures.TokenRetrievalError,
    failures.SSOError,
    failures.ProfileNotFound,
    failures.ParamValidationError,
    failures.UnknownServiceError,
    failures.NoRegionError,
    failures.InvalidRegionError,
    failures.ConfigParseError,
)

T = TypeVar("T")


class Refused(ProviderError):
    """EC2 said no, with this code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Clients:
    """boto3's clients of an account by service and region, made once. Any thread may ask; no client is shared anew."""

    def __init__(self, profile: str | None, read_seconds: float = READ_SECONDS) -> None:
        self._profile, self._read_seconds = profile, read_seconds
        self._session: boto3.session.Session | None = None
        self._made: dict[tuple[str, str], Any] = {}
        self._guard = threading.Lock()

    def get(self, service: str, region: str) -> Any:
        """A client. Raises ProviderError when boto3 cannot make one."""
        with self._guard:
            try:
                if self._session is None:
                    self._session = boto3.session.Session(profile_name=self._profile)
                if (service, region) not in self._made:
                    self._made[service, region] = self._session.client(
                        service,
                        region_name=region,
                        config=Config(
                            connect_timeout=CONNECT_SECONDS,
                            read_timeout=self._read_seconds,
                            retries={"total_max_attempts": 1, "mode": "standard"},
                            max_pool_connections=10,
                        ),
                    )
                return self._made[service, region]
            except (failures.BotoCoreError, ValueError) as error:
                raise ProviderError(
                    f"boto3 makes no client of {service} in {region}: {type(error).__name__}"
                ) from error


@functools.cache
def shared_clients(profile: str | None) -> Clients:
    """One set of clients for all providers of a process that use a profile: to make one takes 0.2 s of CPU."""
    return Clients(profile)


def call(what: str, send: Callable[[], T]) -> T:
    """The answer of one request. Raises Refused, NoCapacity, ProviderError, ProviderUnclear."""
    try:
        return send()
    except failures.ClientError as error:
        code, status, text = _parts(error)
        said = f"{what}: {code}: {text}"
        if code in NO_CAPACITY:
            raise NoCapacity(said) from None
        if code in _THROTTLED or status >= 500 or status < 400:
            raise ProviderUnclear(said) from None
        raise Refused(code, said) from None
    except _NEVER_SENT as error:
        raise ProviderError(f"{what}: not sent: {_words(error)}") from None
    except (failures.BotoCoreError, ResponseParserError, OSError) as error:
        raise ProviderUnclear(f"{what}: no whole answer: {_words(error)}") from None


def _parts(error: failures.ClientError) -> tuple[str, int, str]:
    answer: Any = error.response
    about = answer.get("Error", {})
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(about.get("Code", "?")), int(status), str(about.get("Message", ""))[:200]


def _words(error: Exception) -> str:
    """Its kind only where its text may quote what was sent or received, user data among it."""
    quotes = isinstance(error, failures.ParamValidationError | ResponseParserError)
    return type(error).__name__ if quotes else f"{error!s:.200}"
