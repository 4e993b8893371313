"""How much a tenant may do: requests and tokens a minute, and what its work may hold. `limits.yaml` says it.

The answer to a request that is too much is 429, with the headers that OpenAI sends (x-ratelimit-…) and Retry-After;
where waiting does not help, `x-should-retry: false` in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from batch_assets.api.access.api_keys import TENANT_FORM, is_tenant
from batch_assets.api.access.token_bucket import Decision
from batch_assets.api.requests.api_error import ApiError
from gpu_runner.errors import ExitStatus, UserFacingError
from resources.yaml_files import read_settings

FILE = "limits.yaml"
LONGEST_WAIT = 60.0
NO_RETRY = {"x-should-retry": "false"}  # the stock clients do not send such a request again


class LimitsError(UserFacingError):
    """The file of limits cannot be used."""

    exit_status = ExitStatus.WRONG_REQUEST


class TenantLimits(BaseModel):
    """Most of everything for one tenant. Open batches and queued lines: of batches that have not ended."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    requests_per_minute: int = Field(default=1_000, ge=1, le=10_000_000)
    tokens_per_minute: int = Field(default=5_000_000, ge=1, le=10**12)
    open_batches: int = Field(default=10_000, ge=1, le=10**9)
    queued_lines: int = Field(default=20_000_000, ge=1, le=10**12)
    storage_bytes: int = Field(default=1 << 40, ge=1, le=1 << 60)


def _tenant(name: str) -> str:
    if not is_tenant(name):
        raise ValueError(f"expected a tenant, of {TENANT_FORM}")
    return name


class Limits(BaseModel):
    """Limits of everybody, and of tenants that have their own. A tenant's own entry is whole: what it leaves out is the
    default of the program, not that of `default`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: TenantLimits = TenantLimits()
    tenants: dict[Annotated[str, AfterValidator(_tenant)], TenantLimits] = {}

    def of(self, tenant: str) -> TenantLimits:
        """The limits of one tenant."""
        return self.tenants.get(tenant, self.default)


def read_limits(path: Path) -> Limits:
    """The limits of a file, the defaults where there is none. Raises LimitsError."""
    return read_settings(path, Limits, LimitsError)


def rate_headers(kind: str, per_minute: int, decision: Decision) -> dict[str, str]:
    """OpenAI's rate-limit headers of one kind, `requests` or `tokens`."""
    return {
        f"x-ratelimit-limit-{kind}": str(per_minute),
        f"x-ratelimit-remaining-{kind}": str(decision.remaining),
        f"x-ratelimit-reset-{kind}": duration(decision.reset_seconds),
    }


def too_many(kind: str, per_minute: int, amount: int, decision: Decision) -> ApiError:
    """The 429 for a request that is over a limit a minute."""
    headers = rate_headers(kind, per_minute, decision)
    if math.isinf(decision.wait_seconds):
        message = f"Request too large: limit {per_minute} {kind} per min (TPM), requested {amount}."
        return ApiError(429, message, code="rate_limit_exceeded", kind=kind, headers={**headers, **NO_RETRY})
    headers |= retry_after(decision.wait_seconds)
    unit = "RPM" if kind == "requests" else "TPM"
    message = (
        f"Rate limit reached on {kind} per min ({unit}): limit {per_minute}, requested {amount}. "
        f"Please try again in {duration(decision.wait_seconds)}."
    )
    return ApiError(429, message, code="rate_limit_exceeded", kind=kind, headers=headers)


def check_quota(what: str, limit: int, held: int, asked: int = 1, *, ends_by_itself: bool = True) -> None:
    """Refuse what would hold more than a tenant may. Raises ApiError 429.

    What is held by work that `ends_by_itself` is less after a while, so that the same may be sent again. Files stay
    until somebody deletes them, and more than the limit alone is never granted: waiting does not help.
    """
    if held + asked <= limit:
        return
    later = ends_by_itself and asked <= limit
    raise ApiError(
        429,
        f"You exceeded your quota of {what}: limit {limit:,}, held {held:,}, requested {asked:,}.",
        code="quota_exceeded",
        kind="insufficient_quota",
        headers=retry_after(LONGEST_WAIT) if later else NO_RETRY,
    )


def retry_after(seconds: float) -> Mapping[str, str]:
    """When to come again: the header of RFC 9110 in whole seconds, and OpenAI's in milliseconds."""
    return {"Retry-After": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1000)))}


def duration(seconds: float) -> str:
    """Seconds as OpenAI's headers have them: `120ms`, `1.5s`, `6m0s`."""
    milliseconds = max(0, math.ceil(seconds * 1000))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest = divmod(math.ceil(milliseconds / 1000), 60)
    return f"{minutes}m{rest}s"
