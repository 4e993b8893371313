"""The router: what it learns, what it does before it has, and what it does for callers with a target."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from gpu_runner.routing.engine_view import STALE_SECONDS, EngineReport
from gpu_runner.routing.latency_model import LatencyModel
from gpu_runner.routing.latency_target import LatencyTarget
from gpu_runner.routing.prefix_index import BLOCK_BYTES, block_keys
from gpu_runner.routing.router import Choice, Reason, RoutedRequest, Router, RoutingPolicy, Rule

STEP = 0.01


def idle(router: Router, names: Iterable[str], now: float) -> None:
    """All of these say that they have nothing to do but ours."""
    for name in names:
        router.report(name, EngineReport(0, 0, 0.0, now))


def serve(router: Router, speeds: dict[str, float], requests: int, seed: int = 1, start: float = 0.0) -> Counter[str]:
    """Requests one after the other through engines that compute a prompt's token in so many seconds; how many went
    where. An engine answers at once after the first token.
    """
    rng, now, went = random.Random(seed), start, Counter[str]()
    for _ in range(requests):
        now += 1.0
        request = RoutedRequest(prompt=rng.randint(50, 2000), output=10)
        idle(router, speeds, now)
        choice = router.choose(list(speeds), request, now)
        assert isinstance(choice, Choice)
        routed = router.send(choice.engine, request, now)
        took = STEP + request.prompt * speeds[choice.engine]
        router.first_token(routed, now + took)
        router.end(routed, now + took + 0.1, 11)
        went[choice.engine] += 1
    return went


def test_before_it_knows_enough_the_fewest_requests_decide() -> None:
    router = Router()
    for number in range(9):
        choice = router.choose(["a", "b", "c"], RoutedRequest(100, 10), float(number))
        assert isinstance(choice, Choice) and choice.reason is Reason.FEWEST_REQUESTS
        router.send(choice.engine, RoutedRequest(100, 10), float(number))
    assert sorted(view.in_flight for view in router._views.values()) == [3, 3, 3]


def test_requests_one_at_a_time_teach_of_all_engines() -> None:
    router, speeds = Router(), {"a": 1e-5, "b": 1e-5, "c": 1e-5}
    assert serve(router, speeds, 90) == {"a": 30, "b": 30, "c": 30}
    idle(router, speeds, 91.0)
    choice = router.choose(list(speeds), RoutedRequest(100, 10), 91.0)
    assert isinstance(choice, Choice) and choice.reason is not Reason.FEWEST_REQUESTS


def test_an_engine_that_only_fails_is_preferred_no_longer_than_it_takes_to_know_one() -> None:
    router, went = Router(), Counter[str]()
    for number in range(400):
        choice = router.choose(["good", "broken"], RoutedRequest(100, 10), float(number))
        assert isinstance(choice, Choice)
        routed = router.send(choice.engine, RoutedRequest(100, 10), float(number))
        if choice.engine == "good":
            router.first_token(routed, number + 0.1)
        router.end(routed, number + 0.2)
        went[choice.engine] += 1
    assert went["broken"] == 60


def learned(speeds: dict[str, float], explore_seconds: float = 10.0) -> Router:
    """A router that has seen each engine alone."""
    router = Router(RoutingPolicy(fullness_weight=0.0, explore_seconds=explore_seconds))
    for number, name in enumerate(speeds):
        serve(router, {name: speeds[name]}, 100, start=1000.0 * number)
    return router


def test_it_learns_who_is_fast_and_sends_most_there() -> None:
    router = learned({"fast": 1e-5, "slow": 1e-4})
    went = serve(router, {"fast": 1e-5, "slow": 1e-4}, 200, start=10_000)
    assert went["fast"] > 150
    assert all(error < 0.3 for error in router.errors().values())


def test_a_silent_engine_is_tried_again_now_and_then_where_that_costs_little() -> None:
    router = learned({"fast": 1e-5, "near": 1.5e-5, "slow": 1e-3})
    went = serve(router, {"fast": 1e-5, "near": 1.5e-5, "slow": 1e-3}, 200, start=10_000)
    assert 5 <= went["near"] <= 30 and went["slow"] <= 3


def test_an_engine_that_degrades_is_left() -> None:
    router = learned({"a": 1e-5, "b": 2e-5})
    went = serve(router, {"a": 2e-4, "b": 2e-5}, 400, start=10_000)
    assert went["b"] > 200


def test_a_long_prompt_that_is_being_computed_turns_the_next_one_away() -> None:
    router = learned({"a": 1e-4, "b": 1e-4}, explore_seconds=1e9)
    idle(router, "ab", 9_000.0)
    first = router.choose(["a", "b"], RoutedRequest(10_000, 10), 9_000.0)
    assert isinstance(first, Choice)
    router.send(first.engine, RoutedRequest(10_000, 10), 9_000.0)
    second = router.choose(["a", "b"], RoutedRequest(100, 10), 9_000.1)
    assert isinstance(second, Choice) and second.engine != first.engine
    assert second.order == (second.engine, first.engine)


@pytest.mark.parametrize("whole", [False, True])
def test_prompts_that_are_refused_or_given_up_are_no_backlog(whole: bool) -> None:
    router = learned({"a": 1e-4})
    idle(router, "a", 5_000.0)
    kept = router.send("a", RoutedRequest(3_000, 10), 5_000.0)
    refused = [router.send("a", RoutedRequest(200_000, 10, whole=whole), 5_000.0) for _ in range(20)]
    for one in refused:
        router.end(one, 5_000.1)
    choice = router.choose(["a"], RoutedRequest(1_000, 10, target=LatencyTarget(1.0)), 5_000.1)
    assert isinstance(choice, Choice) and choice.reason is Reason.PREDICTED
    assert choice.prediction.ttft == pytest.approx(0.01 + 0.3 + 0.1 - 0.1, abs=0.15), "what waits still is there"
    router.first_token(kept, 5_000.4)
    assert router._views["a"].backlog == 0


def test_a_cached_prefix_counts_as_computed() -> None:
    router = learned({"a": 1e-4, "b": 1e-4}, explore_seconds=1e9)
    prompt = bytes(range(256)) * 16
    request = RoutedRequest(2000, 10, block_keys(prompt))
    routed = router.send("b", request, 5_000.0)
    router.first_token(routed, 5_000.2)
    router.end(routed, 5_001.0, 10)
    idle(router, "ab", 5_010.0)
    choice = router.choose(["a", "b"], request, 5_010.0)
    assert isinstance(choice, Choice) and choice.engine == "b"


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize(("ttft", "shed", "answered"), [(0.5, True, True), (0.001, True, False), (0.001, False, True)])
def test_a_target_that_no_engine_can_meet_is_shed_or_sent_on(
    ttft: float, shed: bool, answered: bool, rule: Rule
) -> None:
    router = learned({"a": 1e-4, "b": 1e-4})
    router._policy, router._views["b"].probed_at = RoutingPolicy(rule, shed=shed, explore_seconds=1e9), 4_999.0
    idle(router, "ab", 5_000.0)
    choice = router.choose(["a", "b"], RoutedRequest(1000, 10, target=LatencyTarget(ttft)), 5_000.0)
    assert isinstance(choice, Choice) is answered
    assert choice.headroom is not None and (choice.headroom >= 0) is (ttft == 0.5)


def test_a_target_chooses_among_those_that_meet_it() -> None:
    router = learned({"slow": 1e-3, "fast": 1e-5})
    router._policy = RoutingPolicy(Rule.LEAST_REQUESTS, explore_seconds=0.0)
    idle(router, ["slow", "fast"], 5_000.0)
    for target, chosen in ((LatencyTarget(), "slow"), (LatencyTarget(0.2), "fast")):
        choice = router.choose(["slow", "fast"], RoutedRequest(1000, 10, target=target), 5_000.0)
        assert isinstance(choice, Choice) and choice.engine == chosen


def test_of_requests_that_are_shed_one_is_sent_now_and_then_so_that_an_engine_that_is_well_again_is_seen() -> None:
    router = learned({"a": 1e-4, "b": 1e-4})
    router._views["b"].probed_at = 5_000.0
    impossible = RoutedRequest(1000, 10, target=LatencyTarget(0.001))
    sent = []
    for second in range(30):
        idle(router, "ab", 5_000.0 + second)
        if isinstance(router.choose(["a", "b"], impossible, 5_000.0 + second), Choice):
            sent.append(second)
    assert sent == [10, 20]


def test_targets_that_nobody_meets_keep_neither_silent_engines_nor_other_models_from_being_tried() -> None:
    router = learned({"fast": 1e-5, "near": 1.5e-5, "other": 1e-4})
    impossible = RoutedRequest(1000, 10, target=LatencyTarget(0.001))
    tried, sent = 0, Counter[str]()
    for second in range(40):
        now = 5_000.0 + second
        idle(router, ["fast", "near", "other"], now)
        for model in (["fast", "near"], ["other"]):
            sent[model[0]] += isinstance(router.choose(model, impossible, now), Choice)
        choice = router.choose(["fast", "near"], RoutedRequest(1000, 10), now)
        tried += isinstance(choice, Choice) and choice.reason is Reason.EXPLORED
    assert tried == 4 and sent == {"fast": 4, "other": 4}


def test_an_engine_whose_report_is_stale_is_unknown_and_so_the_fewest_of_our_own_requests_decide() -> None:
    router = learned({"a": 1e-5, "b": 1e-4}, explore_seconds=1e9)
    idle(router, "ab", 5_000.0)
    choice = router.choose(["b", "a"], RoutedRequest(1000, 10), 5_001.0)
    assert isinstance(choice, Choice) and (choice.engine, choice.reason) == ("a", Reason.PREDICTED)
    router.report("a", EngineReport(60, 40, 0.9, 5_001.0 + STALE_SECONDS))  # b has said nothing since
    target = RoutedRequest(1000, 10, target=LatencyTarget(0.001))
    choice = router.choose(["a", "b"], target, 5_001.0 + STALE_SECONDS)
    assert isinstance(choice, Choice) and (choice.engine, choice.reason) == ("a", Reason.FEWEST_REQUESTS)
    assert choice.headroom is None, "what is not known is not told, and nobody is refused for it"


def test_requests_of_others_are_those_that_a_report_had_beyond_ours_at_its_time() -> None:
    router = Router()
    routed = [router.send("a", RoutedRequest(100, 10), 100.0) for _ in range(20)]
    router.report("a", EngineReport(50, 10, 0.5, at=100.0))
    for one in routed:
        router.end(one, 100.5)
    view = router._views["a"]
    assert view.others(101.0) == 40, "ours that have ended since are not taken for another's"
    assert view.others(100.0 + STALE_SECONDS + 0.1) == 0
    router.report("b", EngineReport(0, 0, 0.0, at=101.0))
    choice = router.choose(["a", "b"], RoutedRequest(100, 10), 101.0)
    assert isinstance(choice, Choice) and choice.engine == "b"


def test_whole_answers_teach_too_and_count_with_all_their_tokens() -> None:
    """10 ms a step, 0.1 ms a token of the prompt, 5 ms a token of the answer; b at half the speed."""
    router, rng = Router(RoutingPolicy(explore_seconds=1e9)), random.Random(5)
    for number in range(600):
        now, name, slower = 10.0 * number, "ab"[number % 2], 1 + number % 2
        request = RoutedRequest(rng.randint(50, 2000), 100, whole=True)
        router.choose(["a", "b"], request, now)
        routed, tokens = router.send(name, request, now), rng.randint(1, 200)
        router.choose(["a", "b"], request, now + 0.5)  # somebody asks meanwhile
        took = slower * (0.01 + 1e-4 * request.prompt + 0.005 * (tokens - 1))
        router.whole(routed, now + took, tokens)
        router.end(routed, now + took)
    idle(router, "ab", 6_001.0)
    choice = router.choose(["b", "a"], RoutedRequest(1000, 100, whole=True), 6_001.0)
    assert isinstance(choice, Choice) and choice.reason is Reason.PREDICTED and choice.engine == "a"
    assert choice.prediction.ttft + 99 * choice.prediction.tpot == pytest.approx(0.11 + 0.495, rel=0.35)
    assert all(error < 0.5 for error in router.errors().values())


def test_whole_answers_one_at_a_time_are_not_taken_for_late_first_tokens() -> None:
    """Nobody asks while they are made: 10 ms a step, 0.1 ms a token of the prompt, 5 ms a token of the answer."""
    router, rng = Router(RoutingPolicy(explore_seconds=1e9)), random.Random(7)
    for number in range(200):
        now, request = 10.0 * number, RoutedRequest(rng.randint(50, 2000), 200, whole=True)
        router.choose(["a"], request, now)
        routed, tokens = router.send("a", request, now), rng.randint(100, 300)
        took = 0.01 + 1e-4 * request.prompt + 0.005 * (tokens - 1)
        router.whole(routed, now + took, tokens)
        router.end(routed, now + took)
    idle(router, "a", 3_000.0)
    choice = router.choose(["a"], RoutedRequest(1000, 200, target=LatencyTarget(0.5)), 3_000.0)
    assert isinstance(choice, Choice) and choice.reason is Reason.PREDICTED, "the first token comes after 0.11 s"
    assert choice.headroom is not None and choice.headroom > 0.2


def test_requests_whose_first_token_nobody_sees_decode_when_it_should_have_come() -> None:
    router = Router()
    routed = router.send("a", RoutedRequest(1000, 100, whole=True), 0.0)
    view = router._views["a"]
    router.choose(["a"], RoutedRequest(1, 1), routed.predicted / 2)
    assert (len(view.waiting), len(view.decoding)) == (1, 0)
    router.choose(["a"], RoutedRequest(1, 1), routed.predicted * 2)
    assert (len(view.waiting), len(view.decoding)) == (0, 1)
    router.end(routed, 1.0)
    assert view.in_flight == 0


def test_errors_are_read_while_engines_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are read in a thread beside the event loop, on which engines come."""
    router = Router()
    router.known("a", "")

    def error(model: LatencyModel) -> float:
        router.known("b", "")
        return 0.5

    monkeypatch.setattr(LatencyModel, "error", property(error))
    assert router.errors() == {"a": 0.5}


def test_engines_that_are_gone_are_forgotten_when_they_hold_nothing() -> None:
    router = Router()
    routed = router.send("a", RoutedRequest(100, 10), 0.0)
    router.forget(lambda name: False)
    assert "a" in router.errors()
    router.end(routed, 1.0)
    router.forget(lambda name: False)
    assert router.errors() == {}


def test_what_was_learned_of_hardware_outlives_its_engines() -> None:
    router = Router()
    router.report("a", EngineReport(0, 0, 0.0, 0.0), "h200")
    serve(router, {"a": 3e-4}, 200)
    router.forget(lambda name: False)
    assert router.errors() == {}
    router.known("b", "h200")
    assert router._models["b"].token_seconds == pytest.approx(3e-4, rel=0.2)
    assert not router._models["b"].trusted, "a beginning, no knowledge of this engine"


def test_a_new_engine_of_known_hardware_begins_with_what_is_known() -> None:
    router = Router()
    router.report("a", EngineReport(0, 0, 0.0, 0.0), "h200")
    serve(router, {"a": 3e-4}, 200)
    router.report("b", EngineReport(0, 0, 0.0, 0.0), "h200")
    assert router._models["b"].token_seconds == pytest.approx(3e-4, rel=0.2)


def test_a_prompts_blocks_depend_on_all_before_them() -> None:
    one, other = b"a" * 3 * BLOCK_BYTES, b"b" + b"a" * (3 * BLOCK_BYTES - 1)
    assert len(block_keys(one)) == 3 and not set(block_keys(one)) & set(block_keys(other))
    assert block_keys(one)[:2] == block_keys(one[: 2 * BLOCK_BYTES + 5])
    assert block_keys(b"short") == ()
