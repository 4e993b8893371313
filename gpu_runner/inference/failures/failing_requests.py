"""What requests meet while none of them is answered: what a run that makes no progress can say of itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from gpu_runner.client.protocol import EngineError, message_kind
from gpu_runner.client.server_sentence import server_sentence


@dataclass(frozen=True, slots=True)
class FailingRequests:
    """The newest kind of failure since a request was answered last.

    `status` is None where no HTTP status came. `sentence`: the server's words, or what was wrong with its answer,
    without the text of a prompt. `since`: when the first of these requests failed, in seconds of the loop's clock.
    `plays_user`: of those to the model that plays the user, where that has an engine of its own.
    """

    code: str
    status: int | None
    sentence: str
    since: float
    requests: int
    plays_user: bool = False

    @property
    def reason(self) -> str:
        """The code, a status that it does not name, and the sentence."""
        status = "" if self.status is None or str(self.status) in self.code else f" (status {self.status})"
        return f"{self.code}{status}" + (f": {self.sentence}" if self.sentence else "")

    def describe(self, since: float) -> str:
        """For people. `since` is in Unix seconds."""
        moment = time.strftime("%H:%M:%S", time.localtime(since))
        whose = " to the model that plays the user" if self.plays_user else ""
        return f"every request{whose} fails since {moment}: {self.reason}"


@dataclass(frozen=True, slots=True)
class _Newest:
    error: EngineError
    code: str
    message: str
    prompt: bytes | None
    since: float
    requests: int = 1


class FailureRecord:
    """The failures of a feed's requests, to all its engines, since the last answer. Read from any thread."""

    def __init__(self) -> None:
        self._newest: _Newest | None = None
        self._shown: tuple[EngineError, str] | None = None

    def failed(self, error: EngineError, code: str, message: str, now: float, prompt: bytes | None = None) -> None:
        """A request failed. `prompt`: what the message may repeat."""
        last = self._newest
        if last is None:
            self._newest = _Newest(error, code, message, prompt, now)
        elif (last.code, message_kind(last.message)) == (code, message_kind(message)):
            self._newest = replace(last, requests=last.requests + 1)
        else:
            self._newest = _Newest(error, code, message, prompt, last.since, last.requests + 1)

    def answered(self) -> None:
        """A request was answered."""
        self._newest = None

    def failing(self, in_flight: int = 0, before: float = float("inf")) -> FailingRequests | None:
        """What all requests meet, where more have failed than are under way, the first one not after `before`."""
        last = self._newest
        if last is None or last.requests <= in_flight or last.since > before:
            return None
        if self._shown is None or self._shown[0] is not last.error:
            self._shown = (last.error, server_sentence(last.message, last.prompt))
        return FailingRequests(last.code, last.error.status, self._shown[1], last.since, last.requests)
