"""What `batch-assets fleet check` shows of a host. Nothing is started there."""

from __future__ import annotations

import time

from gpu_runner.providers.base import ProviderError, ProviderUnclear
from gpu_runner.providers.checks import CheckOutcome, CheckResult, CheckSubject
from gpu_runner.providers.ssh.config import SshHostConfig, SshProviderConfig
from gpu_runner.providers.ssh.connections import HostConnection
from gpu_runner.providers.ssh.host_requests import BadReply, Inspection, inspect_request, parse_inspection
from gpu_runner.providers.ssh.login import ConnectProblem, NotConnected

LEAST_DISK_KIB = 20 << 20  # 20 GiB: weights of an 8B model, and its cache
CLOCK_SECONDS = 60.0
MEMORY_SHARE = 0.9  # nvidia-smi counts less than the name says: an "80 GB" H100 has 79.6 GiB, a 40 GB A100 39.4

_REMEDIES = {
    ConnectProblem.UNREACHABLE: "is it on, and its SSH server reachable from here? `ssh -p PORT USER@ADDRESS` shows it",
    ConnectProblem.HOST_KEY: "compare the key with one that you trust (on the host: /etc/ssh/ssh_host_*.pub), and only "
    "then change `host_keys` or the file of `known_hosts`",
    ConnectProblem.LOGIN: "put the public key into ~/.ssh/authorized_keys of the user, or correct `user`",
    ConnectProblem.KEY: "correct `key_file` or `key_env`",
}
_SHELL = (
    "can its login shell start sh, and do its startup files (~/.bashrc) end at once? `ssh USER@ADDRESS true` shows it"
)
_OK, _WARNING, _FAILED = CheckOutcome.OK, CheckOutcome.WARNING, CheckOutcome.FAILED
_MACHINES, _LOGIN, _IMAGE = CheckSubject.MACHINES, CheckSubject.CREDENTIALS, CheckSubject.IMAGE


async def inspect_host(connection: HostConnection, config: SshProviderConfig, host: SshHostConfig) -> list[CheckResult]:
    """Everything that renting there needs."""
    program = config.engine_command[0]
    try:
        asked_at = time.time()
        reply = await connection.ask(inspect_request(config.folder, program, config.environment))
        clock = (asked_at + time.time()) / 2
        found = parse_inspection(reply)
    except NotConnected as error:
        return [CheckResult(_LOGIN, _FAILED, str(error), _REMEDIES[error.problem])]
    except (ProviderError, ProviderUnclear, BadReply) as error:
        said = f"host {host.name}: {error}"
        return [CheckResult(_MACHINES, _FAILED, said, _SHELL)]
    login = CheckResult(_LOGIN, _OK, f"{connection.address.text}: host key as pinned, logged in")
    return [login, *judge(found, config, host, clock)]


def judge(found: Inspection, config: SshProviderConfig, host: SshHostConfig, clock: float) -> list[CheckResult]:
    """What an inspection means. `clock`: Unix seconds here when the host said its own."""
    looks = [_tools(found, host), _command(found, config, host), _gpus(found, host), _disk(found, host)]
    return looks + _clock(found, host, clock) + _failed_ends(found, host)


def _tools(found: Inspection, host: SshHostConfig) -> CheckResult:
    if found.missing_tools:
        said = f"host {host.name}: {', '.join(found.missing_tools)} not found"
        return CheckResult(_MACHINES, _FAILED, said, "install coreutils, grep, sed, findutils and util-linux")
    return CheckResult(_MACHINES, _OK, f"host {host.name}: all tools that it needs are there")


def _command(found: Inspection, config: SshProviderConfig, host: SshHostConfig) -> CheckResult:
    program = config.engine_command[0]
    if found.command:
        return CheckResult(_IMAGE, _OK, f"host {host.name}: {program} found")
    remedy = "install it, write its full path into `command`, or set PATH in `environment`: no profile is read"
    return CheckResult(_IMAGE, _FAILED, f"host {host.name}: the engine's command {program} not found", remedy)


def _gpus(found: Inspection, host: SshHostConfig) -> CheckResult:
    wanted = f"{host.gpus} × {host.gpu} with {host.gpu_memory_gib:g} GiB"
    if found.gpus is None:
        said = f"host {host.name}: no nvidia-smi, so its GPUs are not seen"
        return CheckResult(_MACHINES, _WARNING, said, f"is it a host with {wanted}, as fleet.yaml says?")
    seen = ", ".join(f"{gpu.name} ({gpu.memory_mib / 1024:.0f} GiB)" for gpu in found.gpus) or "none"
    large = [gpu for gpu in found.gpus if gpu.memory_mib / 1024 >= MEMORY_SHARE * host.gpu_memory_gib]
    if len(large) < host.gpus:
        said = f"host {host.name}: expected {wanted}, found {seen}"
        return CheckResult(_MACHINES, _FAILED, said, "correct `gpus` and `gpu_memory_gib`, or mend the host")
    return CheckResult(_MACHINES, _OK, f"host {host.name}: GPUs {seen}")


def _disk(found: Inspection, host: SshHostConfig) -> CheckResult:
    if found.disk_kib is None:
        remedy = "make it, with write permission for the user, or name another `folder`"
        return CheckResult(_MACHINES, _FAILED, f"host {host.name}: the folder for machines cannot be made", remedy)
    said = f"host {host.name}: {found.disk_kib / (1 << 20):.1f} GiB free for machines and logs"
    if found.disk_kib < LEAST_DISK_KIB:
        return CheckResult(_MACHINES, _WARNING, said, "weights may not fit, if they lie on the same disk")
    return CheckResult(_MACHINES, _OK, said)


def _failed_ends(found: Inspection, host: SshHostConfig) -> list[CheckResult]:
    remedy = "its log, machines/{0}/{0}.log, says why; it is tried again. If nothing of it runs, remove machines/{0}"
    return [
        CheckResult(_MACHINES, _WARNING, f"host {host.name}: {one.describe()}", remedy.format(one.name))
        for one in found.failed_ends
    ]


def _clock(found: Inspection, host: SshHostConfig, clock: float) -> list[CheckResult]:
    if found.clock is None:
        return []
    offset = found.clock - clock
    said = f"host {host.name}: its clock is {offset:+.0f} s from ours"
    if abs(offset) > CLOCK_SECONDS:
        return [CheckResult(_MACHINES, _WARNING, said, "let it keep time (chrony); TLS and log times need it")]
    return [CheckResult(_MACHINES, _OK, said)]
