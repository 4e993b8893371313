"""Scripted faults: which requests fail, how, and how often. Pure; the server carries them out.

A rule is a JSON object:

    {"kind": KIND, "match": MATCH, "times": K, …parameters of the kind}

`match` (all its parts must hold; without it every request matches):

    {"contains": TEXT}     the prompt contains TEXT
    {"every": N}           request numbers N, 2N, 3N … (requests for text or vectors, counted from 1)
    {"at_request": N}      request number N
    {"rate": P}            a share P of all prompts, chosen by a hash of prompt and seed

`times` limits a rule to the first K requests of each prompt; without it, always.

What the request meets (the first rule that matches wins):

    http_429 (retry_after=1)   http_500   http_503
    hang           no answer, ever                      reset           reset before any byte of the answer
    reset_mid_body reset in the middle of the answer    drop_idle       reset if the connection was used before: what
                                                                        a client meets that reuses an idle connection
    garbage        200 whose body is not JSON           broken_finish   200 without a finish reason
    wrong_json     prose, whatever the schema           too_long        refused as longer than the context

What the whole engine meets (without `match`: at once, or `after` seconds from now):

    crash          the process kills itself             engine_dead (exit_after=3)  the engine process of vLLM died: 500
                                                                        everywhere, /health 503, exit
    stall (seconds)  no progress while /health says 200   slow (factor, seconds)   time runs `factor` times slower
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_REQUEST_KINDS = """
http_429 http_500 http_503 hang reset reset_mid_body drop_idle garbage broken_finish wrong_json too_long
"""
REQUEST_KINDS = frozenset(_REQUEST_KINDS.split())
ENGINE_KINDS = frozenset(("crash", "engine_dead", "stall", "slow"))
_MATCHES: dict[str, tuple[type, ...]] = {
    "contains": (str,),
    "every": (int,),
    "at_request": (int,),
    "rate": (int, float),
}
_NUMBERS = {"retry_after", "after", "exit_after", "seconds", "factor"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One rule, checked."""

    kind: str
    match: Mapping[str, Any] | None = None
    times: int | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)

    def number(self, name: str, default: float) -> float:
        """A parameter of the kind."""
        return self.numbers.get(name, default)

    @classmethod
    def parse(cls, rule: Any) -> Fault:
        """Check one rule; raises ValueError that names what is wrong."""
        if not isinstance(rule, dict) or rule.get("kind") not in REQUEST_KINDS | ENGINE_KINDS:
            raise ValueError(f"fault: expected a kind of {sorted(REQUEST_KINDS | ENGINE_KINDS)}, found {rule!r}")
        where = f"fault {rule['kind']}"
        if unknown := set(rule) - {"kind", "match", "times"} - _NUMBERS:
            raise ValueError(f"{where}: unknown keys {sorted(unknown)}")
        times = rule.get("times")
        if times is not None and (not isinstance(times, int) or times < 1):
            raise ValueError(f"{where}: times: expected a number of requests from 1, found {times!r}")
        numbers = {name: rule[name] for name in _NUMBERS & rule.keys() if rule[name] is not None}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise ValueError(f"{where}: {name}: expected a number from 0, found {value!r}")
        return cls(rule["kind"], _match(rule.get("match"), where), times, numbers)

    def matches(self, number: int, digest: str, prompt: str, seed: int) -> bool:
        """Whether a request, by its number and prompt, falls under the rule; `times` is not looked at."""
        match = self.match or {}
        if "contains" in match and match["contains"] not in prompt:
            return False
        if "every" in match and number % match["every"]:
            return False
        if "at_request" in match and number != match["at_request"]:
            return False
        return "rate" not in match or _share(digest, seed) < float(match["rate"])


def _match(match: Any, where: str) -> Mapping[str, Any] | None:
    """Check the `match` of a rule; None when every request matches."""
    if match is not None and not isinstance(match, dict):
        raise ValueError(f"{where}: match: expected an object, found {match!r}")
    given: dict[str, Any] = match or {}
    for name, value in given.items():
        if name not in _MATCHES or isinstance(value, bool) or not isinstance(value, _MATCHES[name]):
            raise ValueError(f"{where}: match: expected one of {sorted(_MATCHES)}, found {name}={value!r}")
        if name != "contains" and given[name] <= 0:
            raise ValueError(f"{where}: match: {name} must be above 0, found {value!r}")
    return given or None


def _share(digest: str, seed: int) -> float:
    """A number in [0, 1) that depends on prompt and seed only."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{digest}".encode()).digest()[:8], "big") / 2**64


class FaultPlan:
    """The rules in force and how often each was applied."""

    def __init__(self, rules: list[Any], seed: int) -> None:
        self.faults = [Fault.parse(rule) for rule in rules]
        self.seed = seed
        self.applied: Counter[str] = Counter()
        self._per_prompt: Counter[tuple[int, str]] = Counter()

    @property
    def immediate(self) -> list[Fault]:
        """Faults of the whole engine that wait for no request."""
        return [fault for fault in self.faults if fault.kind in ENGINE_KINDS and fault.match is None]

    def pick(self, number: int, digest: str, prompt: str, *, reused: bool) -> Fault | None:
        """The fault that request `number` meets. `reused`: its connection carried a request before."""
        for index, fault in enumerate(self.faults):
            if fault.kind in ENGINE_KINDS and fault.match is None:
                continue
            if (fault.kind == "drop_idle" and not reused) or not fault.matches(number, digest, prompt, self.seed):
                continue
            if fault.times is not None:
                if self._per_prompt[index, digest] >= fault.times:
                    continue
                self._per_prompt[index, digest] += 1
            self.applied[fault.kind] += 1
            return fault
        return None
