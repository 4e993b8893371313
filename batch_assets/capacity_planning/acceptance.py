"""How many more rows are to be made until so many are accepted: the rate of acceptance, estimated as rows come. Pure.

The rate is taken to be Beta distributed. It may drift, so older rows count less: before each further stretch of rows,
both counts of the distribution shrink by a factor, as in the power steady model (J. Q. Smith, "A generalization of the
Bayesian steady forecasting model", J. R. Stat. Soc. B 41, 1979, pp. 375-387). The factor is the one, of `FACTORS`,
under which the stretches so far were likeliest, each by the beta-binomial forecast from those before it. Where nothing
drifts it is 1. A forecast over many stretches shrinks the counts further, so it becomes wide where the rate moves.

A range of the rate is that of a normal distribution of its logit, with the variance 1/a + 1/b of a Beta(a, b), and of
a drift that did not show so far (`DRIFT`, a value of ours).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FACTORS = (1.0, 0.95, 0.85, 0.7, 0.5, 0.3)
FACTOR_EVIDENCE = 2.0  # by how much (natural logarithm) a smaller factor must be likelier: noise is no drift
DRIFT = 0.15  # standard deviation of the logit as many rows ahead as were made: no drift so far is no promise
Z = 1.64  # of both bounds: 5 % above, 5 % below
SLACK = 0.015  # rows too many that a round may make, of all rows, when the rate is at its upper bound
GROWTH = 1.0  # most rows of a round, in times of those made before: no forecast goes further
EXPECTED_RATE = 0.5  # where nobody said anything and nothing was measured
RATE_WEIGHT = 2.0  # rows that an expected rate counts for
POOL_WEIGHT = 10.0  # rows that the rate of all strata together counts for in one of them
LEAST_RATE = 1e-6


class Stretch(NamedTuple):
    """Consecutive rows, and those of them that were accepted."""

    rows: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Rate:
    """A Beta(`a`, `b`) of the rate in the newest rows; `factor` of each further `stretch` rows."""

    a: float
    b: float
    factor: float = 1.0
    stretch: float = 1.0

    @property
    def mean(self) -> float:
        """The expected rate."""
        return self.a / (self.a + self.b)

    def bound(self, z: float, ahead: float = 0.0) -> float:
        """The rate over the next `ahead` rows that is `z` standard deviations of the logit above (or below) its
        middle."""
        left = self.factor ** (ahead / self.stretch / 2)  # halfway through them
        a, b = max(0.5, self.a * left), max(0.5, self.b * left)
        further = DRIFT * ahead / (self.a + self.b)
        logit = math.log(self.a / self.b) + z * math.sqrt(1 / a + 1 / b + further**2)
        return max(LEAST_RATE, 1 / (1 + math.exp(-max(-50.0, min(50.0, logit)))))


def estimated_rate(stretches: Sequence[Stretch], prior: Rate) -> Rate:
    """The rate after these stretches, which are about equally long, in their order."""
    made = sum(one.rows for one in stretches)
    if not made:
        return prior
    length = made / len(stretches)
    found = {factor: _filtered(stretches, prior, factor) for factor in FACTORS}
    factor = max(found, key=lambda one: found[one][0] + (FACTOR_EVIDENCE if one == 1.0 else 0.0))
    _, a, b = found[factor]
    return Rate(a, b, factor, length)


def _filtered(stretches: Sequence[Stretch], prior: Rate, factor: float) -> tuple[float, float, float]:
    """Logarithm of the likelihood, and the counts at the end."""
    a, b, likelihood = prior.a, prior.b, 0.0
    for rows, accepted in stretches:
        a, b = max(prior.a, a * factor), max(prior.b, b * factor)
        likelihood += _log_beta(a + accepted, b + rows - accepted) - _log_beta(a, b)
        a, b = a + accepted, b + rows - accepted
    return likelihood, a, b


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


class Expected(NamedTuple):
    """Rows still to be made: at the upper bound of the rate, in the middle, and at its lower bound."""

    low: float = 0.0
    middle: float = 0.0
    high: float = 0.0

    def plus(self, other: Expected) -> Expected:
        """Of both."""
        return Expected(self.low + other.low, self.middle + other.middle, self.high + other.high)


@dataclass(frozen=True, slots=True)
class Stratum:
    """Rows that share a value. `limit`: of its rows in the source, the most that were wanted; `read`: those found. So
    the source has no more where `read` is less. `stretches`: rows made of them."""

    limit: int
    read: int
    stretches: tuple[Stretch, ...] = ()

    @property
    def made(self) -> int:
        """Rows that were made."""
        return sum(one.rows for one in self.stretches)

    @property
    def accepted(self) -> int:
        """Those of them that were accepted."""
        return sum(one.accepted for one in self.stretches)

    @property
    def ended(self) -> bool:
        """Whether the source has no more of them."""
        return self.read < self.limit


@dataclass(frozen=True, slots=True)
class Round:
    """What is to be made next. `limits`: rows of the source by stratum, of all rounds together; empty: nothing more.
    `expected`: rows still to be made, with this round. `missing`: accepted rows below those wanted. `rate`: of all
    strata together."""

    limits: dict[str, int]
    expected: Expected
    missing: int
    rate: Rate


def prior_of(expected_rate: float | None) -> Rate:
    """What is known before the first row."""
    rate = EXPECTED_RATE if expected_rate is None else min(0.999, max(0.001, expected_rate))
    return Rate(RATE_WEIGHT * rate, RATE_WEIGHT * (1 - rate))


def next_round(strata: Mapping[str, Stratum], wanted: int, *, each: float, batch: int, prior: Rate) -> Round:
    """What is to be made next, of rows all of which are made and judged.

    `wanted`: accepted rows of each stratum. `each`: rows that a row of the source becomes. `batch`: rows of a batch:
    with a single stratum, a round is as many batches; with several, they share them. `prior`: before the first row.

    A round is as large as it can be without making too many: with the rate at its upper bound over all of its rows, at
    most `SLACK` of all rows, or one batch, are made beyond the one that was needed. It is not larger than what suffices
    at the lower bound. So rounds are few: each leaves about what the last estimate was wrong by.
    """
    pooled = _together(list(strata.values()), prior)
    ours = Rate(*_weighted(pooled, POOL_WEIGHT)) if len(strata) > 1 else prior
    limits: dict[str, int] = {}
    expected, missing, goes_on = Expected(), 0, False
    short = sum(one.accepted < wanted and not one.ended for one in strata.values())
    spare = 0.0 if len(strata) == 1 else batch / max(1, short)
    for name, one in strata.items():
        need = wanted - one.accepted
        limits[name] = one.limit
        if need <= 0:
            continue
        missing += need
        if one.ended:
            continue
        goes_on = True
        rate = estimated_rate(one.stretches, ours)
        expected = expected.plus(rows_for(need, rate))
        rows = _rows_of_round(need, one.made, rate, spare)
        if len(strata) == 1:
            rows = -(-(one.made + rows) // batch) * batch - one.made  # whole batches, with those that were made
        limits[name] = one.limit + math.ceil(rows / each)
    return Round(limits if goes_on else {}, expected, missing, pooled)


def rows_for(need: int, rate: Rate) -> Expected:
    """Rows that are likely to be needed for so many accepted ones."""
    middle = need / max(LEAST_RATE, rate.mean)
    return Expected(need / rate.bound(Z, middle), middle, need / rate.bound(-Z, middle))


def _rows_of_round(need: int, made: int, rate: Rate, spare: float) -> int:
    most = max(float(need), GROWTH * made)
    low, high = float(need), max(float(need), min(most, need / LEAST_RATE))
    for _ in range(60):  # the most that is not too many: both sides rise and fall with the rows
        rows = (low + high) / 2
        if rows <= need / rate.bound(Z, rows) + max(spare, SLACK * (made + rows)):
            low = rows
        else:
            high = rows
    return math.ceil(max(float(need), min(low, need / rate.bound(-Z, low))))


def _weighted(rate: Rate, most: float) -> tuple[float, float]:
    """Its counts, as if of at most so many rows."""
    weight = min(1.0, most / (rate.a + rate.b))
    return rate.a * weight, rate.b * weight


def _together(strata: Sequence[Stratum], prior: Rate) -> Rate:
    """The rate of all strata, their stretches side by side."""
    if len(strata) == 1:
        return estimated_rate(strata[0].stretches, prior)
    made, accepted = sum(one.made for one in strata), sum(one.accepted for one in strata)
    return Rate(prior.a + accepted, prior.b + made - accepted)
