"""Sums of money in words: one way for all of them. Pure."""

from __future__ import annotations

import math

FINE_BELOW = 10.0  # US dollars
NOTHING_BELOW = 1e-9  # what is left where binary fractions were added up and taken away


def format_usd(usd: float, *, fine: bool = False) -> str:
    """US dollars without a sign of the currency: `1,234.50`, `0.21`, `0.0042`.

    At least two decimals and two significant digits, so that no sum is shown as nothing that is not; what is less than
    a billionth of a dollar is none. `fine`: at least four decimals of sums below 10 $, for columns that are compared
    and added up.
    """
    if not math.isfinite(usd):
        return str(usd)
    if abs(usd) < NOTHING_BELOW:
        usd = 0.0
    least = 4 if fine and abs(usd) < FINE_BELOW else 2
    decimals = max(least, 1 - _exponent(usd)) if usd else least
    whole, _, part = f"{usd:,.{decimals}f}".partition(".")
    return f"{whole}.{part[:least]}{part[least:].rstrip('0')}"


def round_up_usd(usd: float) -> float:
    """The least sum that is not less and that `format_usd` shows as it is: what is told as enough has to be enough."""
    if usd <= 0 or not math.isfinite(usd):
        return usd
    decimals = max(2, 1 - _exponent(usd))
    found = round(usd, decimals)
    return found if found >= usd else round(found + 10.0**-decimals, decimals)


def _exponent(usd: float) -> int:
    """The exponent of the power of ten, once rounded to two significant digits."""
    return int(f"{abs(usd):.1e}".partition("e")[2])
