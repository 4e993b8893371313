"""What interactive and online requests used: priced, and written down before anybody has the end of the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from batch_assets.api.billing.price_list import PriceList, charged
from batch_assets.api.billing.usage import INTERACTIVE, Kind, Tokens, Used
from batch_assets.api.billing.usage_journal import UsageJournal
from batch_assets.api.requests.api_error import ApiError


class InteractiveUsage:
    """Context manager: a journal with prices. `clock`: Unix seconds."""

    def __init__(self, journal: UsageJournal, prices: PriceList, clock: Callable[[], float]) -> None:
        self._journal, self._prices, self._clock = journal, prices, clock

    def __enter__(self) -> Self:
        self._journal.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.__exit__()

    @property
    def lost(self) -> int:
        """Answers that could not be written down: a full disk."""
        return self._journal.lost

    def check_room(self) -> None:
        """Refuse a request while too much waits for a ledger that cannot be reached. Raises ApiError 503."""
        if self._journal.full:
            said = "Usage cannot be recorded now."
            raise ApiError(503, said, code="usage_not_recorded", headers={"Retry-After": "30"})

    def answered(self, tenant: str, model: str, kind: Kind, tokens: Tokens | None, task_id: str | None = None) -> None:
        """An engine answered. `tokens` None: nobody said how many. `task_id`: of an online request, charged once."""
        if tokens is None:
            used = Used(requests=1, unmetered=1)
        else:
            used = charged(self._prices.interactive_prices(model), tokens)
        self._journal.write(self._clock(), tenant, INTERACTIVE, model, kind, used, task_id)
