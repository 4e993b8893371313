"""The budget of a batch (`metadata.budget_usd`): lines are sent while what they may cost at the most fits into it.

A line's bound is a token for each byte of its request, which no tokenizer with a vocabulary of bytes exceeds, and the
most tokens that its answer may have. It is held back while the line is under way, and replaced by the line's price when
the answer is kept. So a batch never costs more than its budget, but for lines that limit their answers nowhere where
the model's context is unknown (`UNLIMITED`), and for prompts with images.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import orjson
import sqlalchemy as sa

from batch_assets.api.billing.price_list import DECIMALS, TokenPrices
from batch_assets.api.billing.usage import PICODOLLARS, Tokens
from batch_assets.api.billing.usage_ledger import upsert
from batch_assets.api.database.batch_records import Held, lock_open
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.usage_tables import BATCH_SPENDING

BUDGET = "budget_usd"
SPENT, STATE = "spent_usd", "budget_state"
MOST_USD = 10**6
UNLIMITED = 16_384  # tokens of an answer whose length nobody limits, of a model whose context is unknown
LIMITS = ("max_completion_tokens", "max_tokens")  # of chats; engines differ in which of the two they follow


class BudgetHolds(Exception):
    """The next line does not fit into what is left of the budget now."""


class BudgetInvalid(ValueError):
    """What a budget was expected to be."""

    def __init__(self) -> None:
        super().__init__(f"expected US dollars above 0, at most {MOST_USD:,}, with at most {DECIMALS} decimals")


def parse_budget(metadata: Mapping[str, str]) -> int | None:
    """The budget in picodollars; None: there is none. Raises BudgetInvalid."""
    if (text := metadata.get(BUDGET)) is None:
        return None
    try:
        usd = Decimal(text.strip())
    except InvalidOperation:
        raise BudgetInvalid from None
    if not usd.is_finite() or not 0 < usd <= MOST_USD or usd != round(usd, DECIMALS):
        raise BudgetInvalid
    return int(usd * PICODOLLARS)


def most_tokens(body: bytes, context: int | None) -> Tokens:
    """The most tokens that a request can use."""
    fields = orjson.loads(body)
    if "input" in fields and not fields.keys() & {"messages", "prompt"}:  # vLLM ignores an `input` beside those
        return Tokens(len(body))
    names = LIMITS if "messages" in fields else LIMITS[1:]
    limits = [value for name in names if isinstance(value := fields.get(name), int) and value > 0]
    answer = max(limits, default=context or UNLIMITED)
    answers = max(value if isinstance(value := fields.get(name), int) else 1 for name in ("n", "best_of"))
    prompts = fields.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1
    return Tokens(len(body), 0, answer * max(1, answers) * several)


class BatchBudget:
    """What a batch may cost, in picodollars, and what it has cost. Safe to use from several threads."""

    def __init__(self, limit: int, prices: TokenPrices, context: int | None = None) -> None:
        self._limit, self._prices, self._context = limit, prices, context
        self._lock = threading.Lock()
        self._spent = 0
        self._parts: dict[str, int] = {}  # what of that is of lines of which part, by key
        self._held: dict[str, int] = {}  # by row id
        self._held_back = 0  # their sum
        self._refused: int | None = None  # the bound of the line that was refused last

    @property
    def spent(self) -> int:
        """What the lines that are kept cost."""
        return self._spent

    @property
    def paused(self) -> bool:
        """A line does not fit, and none is under way that could make room for it."""
        with self._lock:
            return self._refused is not None and not self._held and self._refused > self._room()

    def set_part(self, part: str, tokens: Tokens) -> None:
        """What is kept of a part used these tokens, whatever was counted of them before."""
        amount = self._prices.amount(tokens)
        with self._lock:
            self._spent += amount - self._parts.get(part, 0)
            self._parts[part] = amount

    def check(self) -> None:
        """Raises BudgetHolds while the line that was refused last does not fit."""
        with self._lock:
            if self._refused is not None and self._refused > self._room():
                raise BudgetHolds

    def admit(self, rows: Sequence[tuple[str, bytes]]) -> int:
        """How many of these lines (row id, body), from the first on, may be sent. What they may cost is held back."""
        bounds = [(row_id, self._prices.amount(most_tokens(body, self._context))) for row_id, body in rows]
        with self._lock:
            self._refused = None
            for number, (row_id, bound) in enumerate(bounds):
                if bound > self._room():
                    self._refused = bound
                    return number
                self._held_back += bound - self._held.get(row_id, 0)
                self._held[row_id] = bound
        return len(rows)

    def settle(self, part: str, row_id: str, tokens: Tokens) -> None:
        """A line of a part has its outcome."""
        amount = self._prices.amount(tokens)
        with self._lock:
            self._held_back -= self._held.pop(row_id, 0)
            self._spent += amount
            self._parts[part] = self._parts.get(part, 0) + amount

    def _room(self) -> int:
        return self._limit - self._spent - self._held_back


@dataclass(frozen=True, slots=True)
class Spending:
    """What a batch with a budget has cost, in picodollars. `paused`: no line that is left fits."""

    amount: int
    paused: bool

    def shown(self) -> dict[str, str]:
        """As it stands beside the client's own metadata."""
        usd = Decimal(self.amount) / PICODOLLARS
        return {SPENT: f"{usd:f}", STATE: "paused" if self.paused else "within"}


class SpendingRecords:
    """What batches with a budget have cost, for those who ask. Calls block for a short transaction."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def write(self, held: Held, found: Spending) -> bool:
        """What a batch has cost so far. False: it is another's by now, or has ended; nothing is written."""
        with self._records.writing() as connection:
            if not lock_open(connection, held):
                return False
            write_spending(connection, held.batch_id, found)
        return True

    def read(self, batch_ids: Sequence[str]) -> dict[str, Spending]:
        """Read what these batches have spent, where they have."""
        if not batch_ids:
            return {}
        query = sa.select(BATCH_SPENDING).where(BATCH_SPENDING.c.batch_id.in_(batch_ids))
        with self._records.reading() as connection:
            rows = connection.execute(query).mappings().all()
        return {row["batch_id"]: Spending(row["amount"], row["paused"]) for row in rows}


def write_spending(connection: sa.Connection, batch_id: str, found: Spending) -> None:
    """The same inside another transaction."""
    values = {"amount": found.amount, "paused": found.paused}
    insert = upsert(connection, BATCH_SPENDING).values(batch_id=batch_id, **values)
    connection.execute(insert.on_conflict_do_update(index_elements=["batch_id"], set_=values))
