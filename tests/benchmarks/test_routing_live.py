"""The load of benchmarks/routing_live.py, its figures, and one small run of it on simulated engines."""

from __future__ import annotations

import argparse
import math
from collections import Counter

import orjson
import pytest

from benchmarks.routing_live import Load, Seen, as_json, run, table, workload
from gpu_runner.routing.router import Rule

LOAD = Load(
    requests=900, warm_up=100, burst=2.5, prompt=(20, 100), long_share=0.1, shared=0.3, shared_tokens=50, answer=16
)


def test_each_rule_gets_the_same_load_but_for_the_number_that_keeps_prefix_caches_cold():
    one, other = workload(LOAD, 4.0, 1, "111"), workload(LOAD, 4.0, 1, "222")
    assert [chat.at for chat in one] == [chat.at for chat in other]
    for chat, same in zip(one, other, strict=True):
        assert chat.messages[0]["content"] != same.messages[0]["content"]
        assert chat.messages[0]["content"].removeprefix("111") == same.messages[0]["content"].removeprefix("222")
        assert chat.messages[1:] == same.messages[1:]
    assert workload(LOAD, 4.0, 2, "111") != one


def test_arrivals_have_the_rate_that_is_asked_for_and_come_in_bursts():
    times = [chat.at for chat in workload(LOAD, 4.0, 1, "1")]
    assert len(times) == 1000
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.15)
    in_burst = sum((at * 4.0 / 30) % 1.0 < 0.2 for at in times)
    assert in_burst / len(times) == pytest.approx(0.5, abs=0.1)  # 2.5 times the rate, a fifth of the time


def test_some_prompts_are_long_and_some_begin_alike():
    chats = workload(LOAD, 4.0, 1, "1")
    systems = Counter(chat.messages[0]["content"] for chat in chats if len(chat.messages) == 2)
    long = [chat for chat in chats if len(chat.messages) == 1 and len(chat.messages[0]["content"].split()) > 70]
    assert len(systems) == LOAD.prefixes
    assert systems.total() == pytest.approx(300, abs=60)
    assert len(long) == pytest.approx(70, abs=35)


def test_the_table_has_the_ratio_of_the_first_rule_to_the_others():
    one = Seen([0.1] * 98 + [1.0, 2.0], Counter(), (30, 10), Counter(predicted=9, explored=1))
    other = Seen([0.2] * 98 + [4.0, 4.0], Counter({"HTTP 503": 2}), (20, 20), Counter(fewest_requests=10))
    lines = table({"predicted": one, "least_requests": other}).splitlines()
    assert lines[2] == "| predicted | 100 | 0 | 100, 100, 1,000 ms | 75% : 25% | 90% |"
    assert lines[3] == "| least_requests | 102 | 2, 2 HTTP 503 | 200, 200, 4,000 ms | 50% : 50% | 0% |"
    assert lines[4] == "| predicted / least_requests | | | 0.50, 0.50, 0.25 | | |"
    written = orjson.loads(as_json({"predicted": one, "least_requests": other}))
    assert written["least_requests"]["failed"] == {"HTTP 503": 2}
    assert written["predicted"]["tokens"] == [30, 10]
    assert math.isnan(Seen().percentile(0.5))


@pytest.mark.soak("online")
def test_chats_go_through_the_service_under_each_rule_to_both_engines():
    options = argparse.Namespace(endpoint=None, model="bench", speeds=[8.0, 4.0], rate=8.0, rounds=1, seed=1)
    load = Load(
        requests=12, warm_up=4, burst=2.0, prompt=(20, 100), long_share=0.1, shared=0.3, shared_tokens=50, answer=4
    )
    found = run(options, load)
    assert set(found) == {rule.value for rule in Rule}
    for seen in found.values():
        assert (len(seen.first_tokens), seen.failed) == (12, Counter())
        assert all(seen.tokens)
        assert seen.reasons.total() == pytest.approx(12, abs=1)
