"""What goes wrong at a simulated provider: rules of its config, and rules injected from outside while it runs.

The n-th call of a kind meets the same fault for the same seed, whoever makes it and whatever the machines' names are.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence

from gpu_runner.providers.simulated.config import FaultRule


def share(seed: int, *parts: object) -> float:
    """A number in [0, 1) that depends on the seed and the parts only."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def count(connection: sqlite3.Connection, key: str) -> int:
    """Count one more and return the number, from 1. For the body of a transaction."""
    statement = (
        "INSERT INTO counters (key, value) VALUES (?, 1) ON CONFLICT (key) DO UPDATE SET value = value + 1 "
        "RETURNING value"
    )
    return int(connection.execute(statement, (key,)).fetchone()[0])


def inject(connection: sqlite3.Connection, rule: FaultRule, provider: str | None) -> None:
    """Have the rule in force from now on; None: at every provider."""
    connection.execute(
        "INSERT INTO faults (provider, rule, left) VALUES (?, ?, ?)", (provider, rule.model_dump_json(), rule.times)
    )


class FaultPicker:
    """Decides what a call meets, in the transaction that counts the call."""

    def __init__(self, provider: str, rules: Sequence[FaultRule], seed: int) -> None:
        self.provider = provider
        self._rules = rules
        self._seed = seed

    def pick(self, connection: sqlite3.Connection, call: str) -> FaultRule | None:
        """The first rule that hits this call (`boot`: this machine's boot); injected ones come first."""
        number = count(connection, f"{self.provider}/{call}")
        injected = connection.execute(
            "SELECT number, rule, left FROM faults WHERE provider IS NULL OR provider = ? ORDER BY number",
            (self.provider,),
        ).fetchall()
        for key, text, left in injected:
            rule = FaultRule.model_validate_json(text)
            if left != 0 and self._hits(rule, call, number, f"injected {key}"):
                if left is not None:
                    connection.execute("UPDATE faults SET left = left - 1 WHERE number = ?", (key,))
                return rule
        for index, rule in enumerate(self._rules):
            if self._hits(rule, call, number, index) and self._left(connection, rule, index):
                return rule
        return None

    def _hits(self, rule: FaultRule, call: str, number: int, which: object) -> bool:
        return rule.concerns(call) and share(self._seed, self.provider, which, call, number) < rule.rate

    def _left(self, connection: sqlite3.Connection, rule: FaultRule, index: int) -> bool:
        return rule.times is None or count(connection, f"{self.provider}/rule {index}") <= rule.times
