"""Alerts: what operators must know at once, posted to a webhook as JSON that Slack and others understand.

`alerts` in fleet.yaml says where to. The address is a secret: it is in no message and no log of ours.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

import orjson
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from gpu_runner.fleet_database.capacity_plan import ToldAlert

AlertKind = Literal["late", "infeasible", "budget", "quality", "no_capacity", "requests_fail", "backup", "on_time"]

AGAIN_SECONDS = 6 * 3600.0  # told once more while it lasts
CALM_SECONDS = 15 * 60.0  # what was told and is over is not told anew before: a figure on the edge would ring for ever
GRACE_SECONDS = 0.5  # for the thread that posts, beyond its time-out

LOG = logging.getLogger(__name__)

State = dict[str, tuple[ToldAlert, ...]]  # what was told, by dataset
Problems = dict[int, str]


class AlertConfig(BaseModel):
    """Where alerts go. One of the two: `webhook_env`, the variable that holds the address, or `webhook` itself."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)
    webhook_env: str | None = Field(
        default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="environment variable that holds the address"
    )
    webhook: SecretStr | None = Field(default=None, description="the address: http:// or https://, a secret")
    timeout_seconds: float = Field(default=5, gt=0, le=30, description="how long one look may wait for the webhook")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, given: object) -> object:
        """Not left to pydantic, whose errors hold the values: under a misspelled key, the secret."""
        if isinstance(given, dict) and (unknown := sorted(map(str, given.keys() - cls.model_fields.keys()))):
            raise ValueError(f"expected the keys {', '.join(cls.model_fields)}, found also {', '.join(unknown)}")
        return given

    @model_validator(mode="after")
    def _one_address(self) -> AlertConfig:
        if (self.webhook is None) == (self.webhook_env is None):
            raise ValueError("expected one of webhook_env and webhook")
        if self.webhook is not None and not _is_address(self.webhook.get_secret_value()):
            raise ValueError("webhook: expected an address with http:// or https:// and a host")
        return self

    def address(self) -> str:
        """Where to post. Raises NoAddress, without saying what it found."""
        if self.webhook is not None:
            return self.webhook.get_secret_value()
        found = os.environ.get(self.webhook_env or "", "").strip()
        if not _is_address(found):
            what = "nothing" if not found else "something else"
            raise NoAddress(f"{self.webhook_env}: expected an address with http:// or https://, found {what}")
        return found


class NoAddress(Exception):
    """The variable that should hold the webhook's address does not."""


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Alert:
    """What is wrong with a dataset, or `on_time`: nothing. `figures` are the numbers of the text, for machines."""

    kind: AlertKind
    dataset: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def due(state: State, alerts: Sequence[Alert], now: float) -> list[Alert]:
    """Which alerts of this look are to be told: what is new, what lasts for AGAIN_SECONDS, and the end of it.

    `on_time` counts only where nothing else is said of the dataset, and only after something was told. What was told
    and was over may be told again after CALM_SECONDS. Datasets that are not mentioned stay as they are.
    """
    bad = {alert.dataset for alert in alerts if alert.kind != "on_time"}
    found: list[Alert] = []
    for alert in alerts:
        told = state.get(alert.dataset, ())
        if alert.kind == "on_time":
            if alert.dataset not in bad and any(not one.over for one in told):
                found.append(alert)
            continue
        before = next((one for one in told if one.kind == alert.kind), None)
        wait = 0.0 if before is None else CALM_SECONDS if before.over else AGAIN_SECONDS
        if before is None or not 0 <= now - before.at < wait:
            found.append(alert)
    return found


def settle(state: State, alerts: Sequence[Alert], told: Sequence[Alert], now: float) -> None:
    """Keep in `state` what was said in this look and what was told of it."""
    said: dict[str, set[str]] = {}
    for alert in alerts:
        said.setdefault(alert.dataset, set()).add(alert.kind)
    ended = {alert.dataset for alert in told if alert.kind == "on_time"}
    new = {(alert.dataset, alert.kind): ToldAlert(alert.kind, now) for alert in told if alert.kind != "on_time"}
    for dataset in {*state, *(dataset for dataset, _ in new)}:
        kinds = said.get(dataset, set()) - {"on_time"}
        before = [one for one in state.pop(dataset, ()) if (dataset, one.kind) not in new]
        ends = {one.kind for one in before if dataset in ended or (kinds and one.kind not in kinds)}  # another's place
        over = [replace(one, over=one.over or one.kind in ends) for one in before]
        kept = [one for one in over if not one.over or now - one.at < CALM_SECONDS]
        if found := (*kept, *(one for (of, _), one in new.items() if of == dataset)):
            state[dataset] = found


class Alerts:
    """Posts alerts, each once. `state` is kept by the caller between looks; it is changed here."""

    def __init__(
        self,
        config: AlertConfig | None,
        state: State,
        *,
        clock: Callable[[], float] = time.time,
        log: Callable[[str], None] = LOG.warning,
    ) -> None:
        self._config, self._clock, self._log = config, clock, log
        self.state = state

    def tell(self, alerts: Sequence[Alert]) -> list[Alert]:
        """Post what is due, and return what was delivered; the rest is tried again at the next look.

        Never raises, and takes no longer than `timeout_seconds` and half a second, whatever the webhook does.
        """
        if self._config is None:
            return []
        now = self._clock()
        wanted = due(self.state, alerts, now)
        problems = self._post(self._config, wanted) if wanted else {}
        for number, problem in sorted(problems.items()):
            alert = wanted[number]
            self._log(
                f"alert {alert.kind!r} of {alert.dataset} was not delivered: {problem}; the next look tries again"
            )
        delivered = [alert for number, alert in enumerate(wanted) if number not in problems]
        settle(self.state, alerts, delivered, now)
        return delivered

    def _post(self, config: AlertConfig, alerts: Sequence[Alert]) -> Problems:
        """Post all at once; what went wrong by place. In a thread: looking up a host name has no time-out."""
        import aiohttp  # noqa: F401 - here, or it would count as the webhook's time

        seconds = config.timeout_seconds
        problems: Problems = dict.fromkeys(range(len(alerts)), f"no answer within {seconds:g} s")

        def post() -> None:
            try:
                answers = asyncio.run(_post_all(config.address(), alerts, seconds))
            except NoAddress as error:
                answers = [str(error)] * len(alerts)
            except Exception as error:  # its text may hold the address
                answers = [type(error).__name__] * len(alerts)
            for number, answer in enumerate(answers):
                if answer is None:
                    problems.pop(number)
                else:
                    problems[number] = answer

        thread = threading.Thread(target=post, name="alerts", daemon=True)
        thread.start()
        thread.join(seconds + GRACE_SECONDS)
        return dict(problems)


def _body(alert: Alert) -> bytes:
    said = {"text": alert.text, "kind": alert.kind, "dataset": alert.dataset, "figures": dict(alert.figures)}
    return orjson.dumps(said, default=str, option=orjson.OPT_NON_STR_KEYS)


def _proxy_for(address: str) -> str | None:
    """The proxy that the environment names for this address. Not aiohttp's `trust_env`: that also sends a password of
    ~/.netrc to the webhook's host.
    """
    parts = urlsplit(address)
    proxy = urllib.request.getproxies().get(parts.scheme)
    return None if not proxy or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]) else proxy


async def _post_all(address: str, alerts: Sequence[Alert], seconds: float) -> list[str | None]:
    """Post each; for each None, or what went wrong. Redirects are not followed: they lead to another host."""
    import aiohttp

    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "batch-assets"}
    limit, proxy = aiohttp.ClientTimeout(total=seconds), _proxy_for(address)
    # Of an answer only the status counts: its body is neither read nor unpacked.
    async with aiohttp.ClientSession(
        timeout=limit, headers=headers, auto_decompress=False, read_bufsize=1 << 14
    ) as session:

        async def post(alert: Alert) -> str | None:
            try:
                async with session.post(address, data=_body(alert), allow_redirects=False, proxy=proxy) as answer:
                    return None if 200 <= answer.status < 300 else f"HTTP {answer.status}"
            except TimeoutError:
                return f"no answer within {seconds:g} s"
            except Exception as error:  # its text may hold the address
                return type(error).__name__

        return await asyncio.gather(*(post(alert) for alert in alerts))
