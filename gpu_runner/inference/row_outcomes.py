"""What becomes of rows that one engine answered: an outcome, a request once more, or a dead letter.

An answer is an outcome when its batch has room for it, its vector is as long as the others, and its text has the form
that is asked for. One that misses the form is asked again (`_repair`), with the answer and what is wrong with it.
One that was cut at the token limit is asked again with a higher limit, or is a dead letter, where that is wanted.
After the answer to a turn of a conversation the next turn is asked behind it; only the last one is held to the form.
Where a model writes what the user says, that is asked between them (`_user_said`).

Rows that an engine still had when it ended go back into the queue. Those that it may have worked on bear its death: at
several deaths they become suspects (poison_rows.py), which are tried in groups, and a row that ends engines while it is
alone in flight becomes a dead letter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from sys import getsizeof

from gpu_runner.answers import NO_PARTS
from gpu_runner.client.json_schemas.output_schema import Check
from gpu_runner.client.protocol import (
    CONTEXT_EXCEEDED,
    FILTERED,
    TRUNCATED,
    Completion,
    EngineLost,
    EngineRefused,
    Repair,
    RowRejected,
)
from gpu_runner.client.structured_outputs import output_check
from gpu_runner.cost_meter import CostMeter
from gpu_runner.inference.answer_memory import bytes_of
from gpu_runner.inference.poison_rows import Group
from gpu_runner.inference.policy import FeedPolicy
from gpu_runner.inference.row_queue import Work
from gpu_runner.inference.row_state import Item
from gpu_runner.rows import OUTPUT_INVALID, SCHEMA_INVALID, Generation, Origin, Outcome, Output, Turn, UserTurn

LONGER = 2  # times as many tokens are asked for after a cut answer
NO_USER_TURN = "empty_user_turn"  # the model that writes the user's words wrote none
BATCH_FULL = "the answers of its batch have more than {} MiB: lower batch_rows or max_tokens"


class RowOutcomes:
    """Those of one engine. `wake` is called when rows may move.

    `answered_together`: rows in flight whose answers have come with the one that is settled now. `in_flight`, of the
    methods: rows of this engine that have no answer yet, these among them. Methods return whether a trial is over:
    every row of its group of suspects has its outcome.
    """

    def __init__(
        self,
        generation: Generation,
        origin: Origin,
        work: Work,
        spending: CostMeter,
        wake: Callable[[], None],
    ) -> None:
        self._origin, self._work, self._spending, self._wake = origin, work, spending, wake
        self._loop = asyncio.get_running_loop()
        self._generation, self._repair_tries = generation, generation.repair_tries
        self._check: Check | None = output_check(generation)
        self._unlike = SCHEMA_INVALID if generation.json_schema is not None else OUTPUT_INVALID
        self.answered_together = 0

    def completed(self, item: Item, completion: Completion, in_flight: int) -> bool:
        """The row's answer has come, and its tokens are counted. Raises EngineRefused for vectors of another length."""
        if not self._work.memory.fits(item.batch.bytes, bytes_of(completion)[1]):
            problem = BATCH_FULL.format(item.batch.bytes.most >> 20)
            return self.end_dead(item, "answer_too_large", problem, in_flight)
        if isinstance(completion.output, tuple) and (found := self._check_vector(item, len(completion.output))):
            return self.end_dead(item, "vector_length", found, in_flight)
        if completion.filtered:
            problem = f"a content filter ended the answer after {len(completion.output):,} characters"
            return self.end_dead(item, FILTERED, problem, in_flight)
        if item.user_request:
            return self._user_said(item, completion, in_flight)
        if completion.finish_reason == "length" and (most := self._longer_limit(item, completion)):
            before = 0 if item.repair is None else getsizeof(item.repair.answer)
            self._work.ask_for_more(item, most, completion, bytes_of(completion)[0] + before)
            return False
        if completion.finish_reason == "length" and self._generation.on_truncated == "dead":
            problem = f"the answer was cut at the token limit after {completion.completion_tokens:,} tokens"
            return self.end_dead(item, TRUNCATED, problem, in_flight)
        return self._ended(item, completion, in_flight)

    def _ended(self, item: Item, completion: Completion, in_flight: int) -> bool:
        """An answer that is not asked for again because of its length."""
        if item.goes_on:
            return self._next_turn(item, completion, in_flight)
        if self._check is not None and isinstance(completion.output, str):
            unlike = self._check(completion.output)
            if unlike is not None:
                if completion.finish_reason == "length":
                    unlike += "; the answer was cut at the token limit"
                return self._repair(item, completion.output, unlike, in_flight)
        answered = self._answered(item, completion, in_flight)
        if completion.parts is not NO_PARTS:
            answered = replace(answered, parts=completion.parts)
        return self._settle(item, answered)

    def _answered(self, item: Item, completion: Completion, in_flight: int) -> Outcome:
        output, reason = completion.output, completion.finish_reason
        answered = self._outcome(item, output, reason, None, None, item.tries + 1, in_flight)
        if completion.model not in (None, self._origin.model):
            answered = replace(answered, origin=_answered_as(self._origin, completion.model))
        if not item.row.turns:
            return answered
        turn = _turn(item, answered, completion.parts.reasoning)
        return replace(_with_turns(answered, item.turns), turns=(*item.answered_turns, turn))

    def _user_said(self, item: Item, completion: Completion, in_flight: int) -> bool:
        """A model wrote what the user says next: the answer to it is to be asked."""
        said, asked = str(completion.output), self._generation.of_user or self._generation
        if not said.strip():
            problem = f"the user's model wrote nothing after turn {len(item.turns)}"
            return self.end_dead(item, NO_USER_TURN, problem, in_flight)
        reason = completion.finish_reason
        so_far = self._outcome(item, None, None, None, None, item.tries + 1, in_flight)
        writer = _answered_as(self._origin, completion.model or asked.asked_model).model
        spent = (so_far.prompt_tokens, so_far.completion_tokens, so_far.tries, so_far.seconds, so_far.usd)
        turn = Turn(said, None, None, None, 0, 0, 0, 0.0, None, UserTurn(writer, reason, *spent))
        return self._work.next_turn(item, replace(_with_turns(so_far, item.turns), turns=(*item.turns, turn)))

    def _next_turn(self, item: Item, completion: Completion, in_flight: int) -> bool:
        answered = self._answered(item, completion, in_flight)
        return self._work.next_turn(item, replace(answered, output=None, finish_reason=None))

    def end_dead(self, item: Item, code: str, message: str, in_flight: int, last: int = 1) -> bool:
        """The row becomes a dead letter; `last` as in `dead`."""
        return self._settle(item, self.dead(item, code, message, last, in_flight))

    def rejected(self, item: Item, error: RowRejected, in_flight: int) -> bool:
        """The engine refuses the row's request for good. A repair, or a request for a longer answer, that has no room
        leaves the answer as it was.
        """
        if error.code == CONTEXT_EXCEEDED and (cut := item.take_cut()) is not None:
            return self._ended(item, cut, in_flight)
        if item.repair is not None and error.code == CONTEXT_EXCEEDED:
            problem = f"{item.repair.problem}; the request to repair it is longer than the engine's context"
            return self.end_dead(item, self._unlike, problem, in_flight)
        return self.end_dead(item, error.code, error.message, in_flight)

    def _longer_limit(self, item: Item, completion: Completion) -> int | None:
        """The tokens to ask for after a cut answer: twice as many, within the bound. None: it is left as it is, also
        where the engine's context cut it, as it has fewer tokens than it might.
        """
        if self._generation.on_truncated != "retry_longer":
            return None
        generation = self._generation.with_fields(item.row.fields)
        asked, most = item.max_tokens or generation.most_tokens, generation.longest_answer
        if asked is None or most is None or asked >= most:
            return None
        if 0 < completion.completion_tokens < asked:
            return None
        return min(LONGER * asked, most)

    def dead(self, item: Item, code: str, message: str, last: int, in_flight: int = 0) -> Outcome:
        """A dead letter; `last` counts the requests to charge that are not among the row's tries or repairs yet."""
        return _with_turns(self._outcome(item, None, None, code, message, item.tries + last, in_flight), item.turns)

    def _check_vector(self, item: Item, length: int) -> str | None:
        try:
            return self._work.vectors.check(length)
        except EngineRefused:
            self._work.soon(item)
            raise

    def _repair(self, item: Item, answer: str, problem: str, in_flight: int) -> bool:
        attempt = 1 if item.repair is None else item.repair.attempt + 1
        if attempt > self._repair_tries:
            return self.end_dead(item, self._unlike, problem, in_flight)
        self._work.repair(item, Repair(answer, problem, attempt), getsizeof(answer))
        return False

    def _settle(self, item: Item, outcome: Outcome) -> bool:
        group = item.group
        self._work.settle(item, outcome)
        if item.batch.left == 0:
            self._loop.call_soon(self._wake)
        return group is not None and self._work.suspects.row_ended(group)

    def _outcome(
        self,
        item: Item,
        output: Output | None,
        finish_reason: str | None,
        error: str | None,
        message: str | None,
        tries: int,
        in_flight: int,
    ) -> Outcome:
        """Of what was asked last: of a conversation, without the turns before."""
        repairs = 0 if item.repair is None else item.repair.attempt
        return Outcome(
            item.row.row_id,
            item.row.row_key,
            output,
            finish_reason,
            item.prompt_tokens,
            item.completion_tokens,
            tries + repairs + item.cuts,
            error,
            message,
            self._origin,
            item.started_at,
            item.seconds,
            self._usd(item, in_flight, over=error is not None or not item.goes_on),
        )

    def _usd(self, item: Item, in_flight: int, *, over: bool) -> float | None:
        now, together = self._loop.time(), self.answered_together
        others = in_flight - together
        return self._spending.settle(
            item.prompt_tokens,
            item.completion_tokens,
            others,
            now,
            together=together,
            cached_tokens=item.cached_tokens,
            over=over,
        )


def _turn(item: Item, answered: Outcome, reasoning: str | None) -> Turn:
    """The turn that was asked last. `answered`: its outcome, without the turns before."""
    return Turn(
        item.user_says,
        str(answered.output),
        str(answered.finish_reason),
        reasoning,
        answered.prompt_tokens,
        answered.completion_tokens,
        answered.tries,
        answered.seconds,
        answered.usd,
        item.turns[-1].user_model if len(item.answered_turns) < len(item.turns) else None,
    )


def _with_turns(last: Outcome, before: Sequence[Turn]) -> Outcome:
    """The outcome of a conversation whose last request became `last`. Dollars are known where all turns' are."""
    if not before:
        return last
    asked = [request for turn in before for request in turn.requests]
    usd = [last.usd, *(one.usd for one in asked)]
    return replace(
        last,
        prompt_tokens=last.prompt_tokens + sum([one.prompt_tokens for one in asked]),
        completion_tokens=last.completion_tokens + sum([one.completion_tokens for one in asked]),
        tries=last.tries + sum([one.tries for one in asked]),
        seconds=last.seconds + sum([one.seconds for one in asked]),
        usd=None if None in usd else sum([one for one in usd if one is not None]),
        turns=tuple(before),
    )


# Answers of one model share their origin.
_answered_as = lru_cache(maxsize=256)(Origin.answered_as)


def return_rows(
    work: Work,
    policy: FeedPolicy,
    outcomes: RowOutcomes,
    error: BaseException | None,
    group: Group[Item] | None,
    held: Sequence[Item],
    taken: list[Item],
) -> None:
    """Gives `held` back. `error`: why the engine ended; `group`: the suspects that it was trying.

    `taken`: those of `held` that the engine may have worked on.
    """
    blamed: list[Item] = []
    if isinstance(error, EngineLost):
        work.count_engine_death()
        blamed = taken
    if group is not None:
        _return_group(work, policy, outcomes, error, group, held, blamed)
        return
    suspects = {item for item in blamed if item.add_death() >= policy.suspect_deaths}
    work.suspect(suspects)
    work.give_back(item for item in held if item not in suspects)


def _return_group(
    work: Work,
    policy: FeedPolicy,
    outcomes: RowOutcomes,
    error: BaseException | None,
    group: Group[Item],
    held: Sequence[Item],
    blamed: list[Item],
) -> None:
    guilty = set(blamed)
    rest = [item for item in held if item not in guilty] + work.leave_group(group)
    if not blamed:
        work.put_back_group(group, rest)
        return
    if len(blamed) == 1:
        item = blamed[0]
        if item.add_alone_death() >= policy.alone_deaths:
            blamed = []
            message = f"alone in flight at {item.alone_deaths} engine deaths, the last: {error}"
            work.settle(item, outcomes.dead(item, "engine_killed", message, item.alone_deaths))
    work.group_died(group, blamed, rest)
