"""How many rows are kept submitted."""

from __future__ import annotations

from gpu_runner.client.engine_load import EngineLoad
from gpu_runner.inference.windows.concurrency_window import Window, WindowPolicy

POLICY = WindowPolicy()


def load(running: int, waiting: int = 0, kv: float = 0.3, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(running, waiting, kv, 0, preemptions)


def settle(window: Window, slots: int, ticks: int = 30) -> list[int]:
    """The sizes that a window takes on an engine with so many slots and endless rows."""
    sizes = []
    for _ in range(ticks):
        submitted = window.size
        window.on_tick(load(min(slots, submitted), max(0, submitted - slots)), submitted)
        sizes.append(window.size)
    return sizes


def test_known_slots_give_four_rows_each() -> None:
    assert Window(POLICY, 256).size == 1024
    assert Window(POLICY, 100_000).size == 8192
    assert Window(POLICY, 256, most=300).size == 300


def test_unknown_slots_are_found_by_doubling() -> None:
    for slots in (16, 100, 256, 1024):
        sizes = settle(Window(POLICY, None), slots)
        assert sizes[-1] == sizes[-5]
        assert 3 * slots <= sizes[-1] <= 4 * slots
        assert sizes[5] >= min(sizes[-1], 64 * 2**4)


def test_a_window_that_is_not_used_does_not_grow() -> None:
    window = Window(POLICY, None)
    for _ in range(20):
        window.on_tick(load(10), 10)
    assert window.size == POLICY.start


def test_a_server_without_metrics_gets_a_fixed_window() -> None:
    window = Window(WindowPolicy(blind=48), None)
    for _ in range(5):
        window.on_tick(None, 48)
    assert window.size == 48


def test_a_full_kv_cache_shrinks_the_window_but_not_below_what_runs() -> None:
    window = Window(POLICY, 256)
    for preemptions in range(1, 20):
        window.on_tick(load(200, 100, kv=0.97, preemptions=preemptions), window.size)
    assert window.size == 200


def test_a_full_kv_cache_without_preemption_is_well_used() -> None:
    window = Window(POLICY, 256)
    for _ in range(5):
        window.on_tick(load(256, 700, kv=0.97, preemptions=3), 1024)
    assert window.size == 1024


def test_the_window_recovers_when_preemption_ends() -> None:
    window = Window(POLICY, 256)
    for preemptions in (1, 2, 3):
        window.on_tick(load(200, 100, kv=0.97, preemptions=preemptions), window.size)
    assert window.size < 1024
    for _ in range(30):
        window.on_tick(load(200, 800, kv=0.8, preemptions=3), window.size)
    assert window.size == 1024
