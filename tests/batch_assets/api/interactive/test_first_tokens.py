"""What batches see of interactive requests on their engine."""

from __future__ import annotations

from batch_assets.api.interactive.first_tokens import FirstTokens
from gpu_runner.inference.windows.first_token_window import FirstTokenSample

ENGINE = "http://engine:1"
NOTHING = FirstTokenSample()


def test_a_streamed_request_is_seen_while_it_waits_and_when_its_first_token_comes() -> None:
    tokens = FirstTokens(lambda: 10.0)
    look = tokens.reader(ENGINE)
    number = tokens.begin(ENGINE, 8.0)
    assert look() == FirstTokenSample(waiting=2.0)
    assert tokens.end(ENGINE, number, came=True) == 2.0
    assert tokens.end(ENGINE, number, came=False) is None
    assert look() == FirstTokenSample((2.0,)) and look() == NOTHING


def test_a_request_that_is_not_streamed_is_unseen_while_it_is_under_way_and_for_one_more_look() -> None:
    tokens = FirstTokens(lambda: 10.0)
    look = tokens.reader(ENGINE)
    assert look() == NOTHING
    first, second = (tokens.begin(ENGINE, 0.0, streamed=False) for _ in range(2))
    assert look() == look() == FirstTokenSample(unseen=True), "how long it takes says nothing of its first token"
    assert tokens.end(ENGINE, first, came=False) is None
    assert look().unseen
    tokens.end(ENGINE, second, came=False)
    assert look().unseen and look() == NOTHING


def test_a_request_that_came_and_went_between_two_looks_is_unseen_in_the_second() -> None:
    tokens = FirstTokens(lambda: 10.0)
    look, other = tokens.reader(ENGINE), tokens.reader("http://engine:2")
    tokens.end(ENGINE, tokens.begin(ENGINE, 0.0, streamed=False), came=False)
    assert look().unseen and not look().unseen
    assert other() == NOTHING


def test_each_reader_sees_what_came_since_its_own_last_look() -> None:
    tokens = FirstTokens(lambda: 10.0)
    early = tokens.reader(ENGINE)
    tokens.end(ENGINE, tokens.begin(ENGINE, 0.0, streamed=False), came=False)
    late = tokens.reader(ENGINE)
    assert early().unseen and not late().unseen
