"""What is sent to a host, and what it answers. Pure.

A request is a text for the standard input of `sh`: assignments of what it needs, quoted by `shlex.quote`, the functions
of `host_requests.sh` (`host_end.sh` is one of the values), and the call of `main` in the last line. So no value stands
on a command line, and a text of which the end is missing does nothing. The answer stands between `begin NONCE` and `end
NONCE RESULT`: whatever a login shell prints before is skipped, and an answer without its end is none.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import resources
from typing import cast

from gpu_runner.providers.base import EndReason, Machine, MachineState
from gpu_runner.providers.ssh.config import DOCKER_END

LONGEST_REPLY = 1 << 20  # bytes
GRACE_SECONDS = 10  # vLLM drains nothing when it is told to end
KEEP_SECONDS = 86_400  # how long `list` still shows what has ended

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_PLACEHOLDER = re.compile(r"\{(model|port|gpus|name)\}")
_MACHINE = re.compile(
    r"machine ([a-z0-9][a-z0-9._-]{0,62}) (i-[0-9a-f]{12}) (booting|running|ended) (\d{4,5}) (\d{1,9}|-) "
    r"(\d{1,12}\.\d\d|-) (-|[a-z-]{1,20}) (\d{1,12}\.\d\d|-)"
)
_GPU = re.compile(r"gpu ([A-Za-z0-9][A-Za-z0-9._-]{0,63}) ([a-z0-9][a-z0-9._-]{0,62})")
_FAILED_END = re.compile(r"failed-end ([a-z0-9][a-z0-9._-]{0,62}) (\d{1,9})")
_SEEN = re.compile(r"seen (\d{1,3}), (\d{1,9}), ([ -~]{1,100})")


class Result(Enum):
    """How a request ended. All but OK: nothing was done."""

    OK = "ok"
    NO_CAPACITY = "no-capacity"
    BUSY = "busy"
    NO_FOLDER = "no-folder"
    NO_TOOLS = "no-tools"
    NO_SPACE = "no-space"
    NO_PORT = "no-port"
    UNKNOWN_REQUEST = "unknown-request"


RESULT_TEXTS = {
    Result.NO_CAPACITY: "all its GPUs are taken",
    Result.BUSY: "another request holds it",
    Result.NO_FOLDER: "its folder for machines cannot be made or written",
    Result.NO_TOOLS: "it has no flock or setsid (package util-linux)",
    Result.NO_SPACE: "a machine cannot be written down; is its disk full?",
    Result.NO_PORT: "no port of loopback is free",
    Result.UNKNOWN_REQUEST: "it does not know the request",
}
_REASONS: Mapping[str, tuple[EndReason | None, str]] = {
    "terminated": (EndReason.TERMINATED, ""),
    "interrupted": (EndReason.INTERRUPTED, ""),
    "host-restarted": (EndReason.INTERRUPTED, "the host was started anew"),
    "boot-failed": (EndReason.BOOT_FAILED, ""),
    "orphaned": (EndReason.ORPHANED, ""),
    "-": (None, ""),
}


class BadReply(ValueError):
    """A host's answer is not what it should be."""


@dataclass(frozen=True, slots=True)
class FailedEnd:
    """A machine whose end command has failed so many times. It is tried again."""

    name: str
    tries: int

    def describe(self) -> str:
        """For people."""
        return f"the end of {self.name} is not finished: its end command fails (tries: {self.tries}); GPUs stay taken"


@dataclass(frozen=True, slots=True)
class HostMachine:
    """A machine as its host says. `port`: of its engine, on the host's loopback.

    Seconds: `ended_seconds` since its end; `billed_seconds` since it was made, or until its end; None where the host
    was started anew since. `failed_ends`: how often its end command has failed; its GPUs stay taken until it succeeds.
    """

    name: str
    id: str
    state: MachineState
    port: int
    slots: int | None
    ended_seconds: float | None
    reason: EndReason | None = None
    detail: str = ""
    billed_seconds: float | None = None
    failed_ends: int = 0

    def machine(self, host: str) -> Machine:
        """As a provider tells it."""
        endpoint = f"ssh://{host}/{self.port}" if self.state == "running" else None
        failed = FailedEnd(self.name, self.failed_ends)
        return Machine(
            self.name,
            self.id,
            self.state,
            endpoint,
            max_num_seqs=self.slots,
            ended_seconds=self.ended_seconds,
            billed_seconds=self.billed_seconds,
            reason=self.reason,
            detail=self.detail,
            leftover=f"host {host}: {failed.describe()}" if failed.tries else "",
        )


@dataclass(frozen=True, slots=True)
class HostReply:
    """What a host answered. `taken`: GPU devices that have a machine. `lines`: all of it."""

    result: Result
    machines: tuple[HostMachine, ...]
    taken: frozenset[str]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A text for `sh`, and the nonce by which its answer is known."""

    text: bytes
    nonce: str


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A machine to be made. `command`: words with `{port}`, `{gpus}`, `{name}`, `{model}`.

    `environment` holds the engine's key. `slots`: rows at once. Each of `gpu_sets` is enough for it.
    """

    name: str
    model: str
    command: tuple[str, ...]
    end_command: tuple[str, ...]
    environment: Mapping[str, str]
    gpu_sets: Sequence[Sequence[str]]
    slots: int | None
    orphan_seconds: int
    first_port: int


def list_request(folder: str, tag: str, *, sign_of_life: bool) -> HostRequest:
    """Machines whose name starts with the tag, and which GPUs are taken. `sign_of_life`: they are to live on."""
    return _request("list", folder, tag=tag, sign="1" if sign_of_life else "0")


def show_request(folder: str, name: str, *, ready: bool) -> HostRequest:
    """One machine. `ready`: its engine has answered, which is written down."""
    return _request("show", folder, name=name, ready="1" if ready else "0")


def terminate_request(folder: str, name: str) -> HostRequest:
    """End a machine."""
    return _request("terminate", folder, name=name)


def inspect_request(folder: str, program: str, environment: Mapping[str, str]) -> HostRequest:
    """Look at tools, disk, clock, GPUs, and whether there is a program of that name."""
    return _request("inspect", folder, program=program, environment_text=_exports(environment))


def create_request(folder: str, plan: EnginePlan) -> HostRequest:
    """Make a machine, or find the one that has the name."""
    return _request(
        "create",
        folder,
        name=plan.name,
        machine_id=f"i-{secrets.token_hex(6)}",
        gpu_sets=" ".join(",".join(one) for one in plan.gpu_sets),
        slots="-" if plan.slots is None else str(plan.slots),
        orphan_seconds=str(plan.orphan_seconds),
        grace_seconds=str(GRACE_SECONDS),
        first_port=str(plan.first_port),
        supervisor_text=_script("host_supervisor.sh"),
        command_text=f"exec {shell_words(plan.command, plan.model)}",
        end_command_text=shell_words(plan.end_command, plan.model),
        environment_text=_exports(plan.environment),
    )


def _request(request: str, folder: str, **values: str) -> HostRequest:
    nonce = secrets.token_hex(8)
    ends = {"end_text": _script("host_end.sh"), "docker_end_text": shell_words(DOCKER_END, model="")}
    given = {"request": request, "nonce": nonce, "folder": folder, **ends, **values}
    if unfit := [name for name, value in given.items() if "\0" in value]:
        raise ValueError(f"{unfit[0]}: expected a text without NUL")
    assignments = "".join(f"{name}={shlex.quote(value)}\n" for name, value in given.items())
    text = f"{assignments}{_script('host_requests.sh')}\nmain </dev/null\n"
    return HostRequest(text.encode("utf-8", "surrogateescape"), nonce)


@cache
def _script(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _exports(environment: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def shell_words(words: Sequence[str], model: str) -> str:
    """The words for a shell that has `port`, `gpus` and `name` as variables; everything else is quoted exactly."""
    return " ".join("".join(_parts(word, model)) or "''" for word in words)


def _parts(word: str, model: str) -> Iterator[str]:
    at = 0
    for found in _PLACEHOLDER.finditer(word):
        if found.start() > at:
            yield shlex.quote(word[at : found.start()])
        yield shlex.quote(model) if found[1] == "model" else f'"${{{found[1]}}}"'
        at = found.end()
    if at < len(word):
        yield shlex.quote(word[at:])


def has_begun(nonce: str, output: bytes) -> bool:
    """Whether the host's sh does what it was asked; before that, its login shell reads its startup files."""
    return f"begin {nonce}\n".encode() in output


def parse_reply(nonce: str, output: bytes) -> HostReply:
    """Read an answer. Raises BadReply for one that is cut off, too long, or says something else than was asked."""
    if len(output) > LONGEST_REPLY:
        raise BadReply(f"expected at most {LONGEST_REPLY} bytes")
    lines = output.decode("utf-8", "replace").split("\n")
    begin, end = f"begin {nonce}", f"end {nonce} "
    if begin not in lines:
        raise BadReply("expected an answer of sh; what came has no beginning")
    lines = lines[lines.index(begin) + 1 :]
    ends = [number for number, line in enumerate(lines) if line.startswith(end)]
    if not ends or ends[0] != len(lines) - 2 or lines[-1]:
        raise BadReply("expected a whole answer; its end is missing, or more follows")
    try:
        result = Result(lines[ends[0]][len(end) :])
    except ValueError:
        raise BadReply("the answer ends with an unknown word") from None
    told = tuple(lines[: ends[0]])
    failed = {one.name: one.tries for one in _failed_ends(told)}
    machines = tuple(_machine(line, failed) for line in told if line.startswith("machine "))
    taken = frozenset(_match(_GPU, line)[1] for line in told if line.startswith("gpu "))
    return HostReply(result, machines, taken, told)


def _failed_ends(lines: Sequence[str]) -> list[FailedEnd]:
    found = [_match(_FAILED_END, line) for line in lines if line.startswith("failed-end ")]
    return [FailedEnd(one[1], int(one[2])) for one in found]


def _machine(line: str, failed: Mapping[str, int]) -> HostMachine:
    name, machine_id, state, port, slots, seconds, reason, billed = _match(_MACHINE, line).groups()
    if reason not in _REASONS:
        raise BadReply(f"a machine has an unknown reason of its end: {reason}")
    return HostMachine(
        name,
        machine_id,
        cast("MachineState", state),
        int(port),
        None if slots == "-" else int(slots),
        None if seconds == "-" else float(seconds),
        *_REASONS[reason],
        billed_seconds=None if billed == "-" else float(billed),
        failed_ends=failed.get(name, 0),
    )


def _match(pattern: re.Pattern[str], line: str) -> re.Match[str]:
    if (found := pattern.fullmatch(line)) is None:
        raise BadReply(f"expected a line such as {pattern.pattern[:7]}…, found {line!r:.80}")
    return found


@dataclass(frozen=True, slots=True)
class SeenGpu:
    """A GPU as nvidia-smi names it; memory in MiB."""

    index: int
    memory_mib: int
    name: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What an inspection found. `gpus`: None where there is no nvidia-smi. `clock`: the host's Unix seconds.

    `failed_ends`: machines whose GPUs stay taken, because their end could not be finished.
    """

    missing_tools: tuple[str, ...]
    command: bool
    disk_kib: int | None
    clock: int | None
    gpus: tuple[SeenGpu, ...] | None
    failed_ends: tuple[FailedEnd, ...] = ()


def parse_inspection(reply: HostReply) -> Inspection:
    """Read the lines of an inspection. Raises BadReply."""
    lines = reply.lines
    gpus = [_match(_SEEN, line) for line in lines if line.startswith("seen ")]
    seen = tuple(SeenGpu(int(found[1]), int(found[2]), found[3]) for found in gpus)
    return Inspection(
        missing_tools=tuple(line.split()[1] for line in lines if re.fullmatch(r"tool \w+ no", line)),
        command="command yes" in lines,
        disk_kib=_number("disk", lines),
        clock=_number("time", lines),
        gpus=seen if "driver yes" in lines else None,
        failed_ends=tuple(_failed_ends(lines)),
    )


def _number(word: str, lines: Sequence[str]) -> int | None:
    found = [int(line.split()[1]) for line in lines if re.fullmatch(rf"{word} \d{{1,15}}", line)]
    return found[0] if found else None
