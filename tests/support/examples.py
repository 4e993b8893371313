"""Property tests whose examples take long: a few in each run, many under `soak`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis.strategies import SearchStrategy


def property_test(
    few: int, many: int, *always: dict[str, Any], **strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """`given(**strategies)` with `few` examples, and with `many` among the soak tests. `always`: tried each time."""

    def decorate(test: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.soak("rows"))])
        def run(examples: int) -> None:
            found = given(**strategies)(test)
            for words in always:
                found = example(**words)(found)
            quiet = [HealthCheck.too_slow]
            settings(max_examples=examples, deadline=None, suppress_health_check=quiet)(found)()

        run.__name__, run.__qualname__, run.__doc__ = test.__name__, test.__qualname__, test.__doc__
        run.__module__ = test.__module__
        return run

    return decorate
