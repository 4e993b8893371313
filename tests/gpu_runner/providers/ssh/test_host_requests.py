"""What is sent to a host is quoted exactly, and what comes back is read strictly."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runner.providers.base import EndReason
from gpu_runner.providers.ssh.host_requests import (
    LONGEST_REPLY,
    BadReply,
    HostMachine,
    Result,
    SeenGpu,
    list_request,
    parse_inspection,
    parse_reply,
    shell_words,
)

WORDS = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20)
    | st.sampled_from(
        ["a b", "it's", '"', "$HOME", "`id`", "$(id)", "x\ny", "\\", "*", "~", "", "{port}", "{model}-{gpus}"]
    ),
    min_size=1,
    max_size=6,
)
MACHINE = b"machine ba-1-a i-0123456789ab running 18000 8 - - 3.00\n"


def echoed(text: str) -> list[str]:
    """The arguments that a command gets from sh."""
    script = f"port=18001 gpus=0,1 name=ba-1\nexec printf '%s\\0' {text}\n"
    done = subprocess.run(["sh"], input=script.encode(), capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.slow
@given(WORDS, st.sampled_from(["m", "org/model name", "it's $HOME `id`", "{port}"]))
def test_a_command_arrives_word_for_word(words: list[str], model: str):
    def filled(word: str) -> str:
        parts = word.split("{model}")
        values = {"{port}": "18001", "{gpus}": "0,1", "{name}": "ba-1"}
        for name, value in values.items():
            parts = [part.replace(name, value) for part in parts]
        return model.join(parts)

    assert echoed(shell_words(words, model)) == [filled(word) for word in words]


def test_a_request_that_is_cut_off_anywhere_does_nothing():
    request = list_request("/nowhere; touch x", "ba-", sign_of_life=True)
    for end in (10, 200, len(request.text) // 2, len(request.text) - len("in </dev/null\n")):
        done = subprocess.run(["sh"], input=request.text[:end], capture_output=True, check=False)
        assert b"begin" not in done.stdout


def test_a_gpu_that_is_freed_while_gpus_are_listed_is_not_taken(tmp_path: Path):
    """Supervisors free them without the host's lock."""
    (tmp_path / "gpus").mkdir()
    for device in ("0", "1"):
        (tmp_path / "gpus" / device).symlink_to("ba-1")
    script = list_request(str(tmp_path), "", sign_of_life=False).text.removesuffix(b"main </dev/null\n")
    script += b"""root=.
    readlink() { case $1 in */0) rm -f "$1" ;; esac; command readlink "$1"; }
    list_gpus; rm -f gpus/1; list_gpus
    """
    done = subprocess.run(["sh"], input=script, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == b"gpu 1 ba-1" and b"gpu 0" not in done.stdout


def test_a_text_with_nul_is_refused():
    with pytest.raises(ValueError, match="folder: expected a text without NUL"):
        list_request("a\0b", "", sign_of_life=False)


def test_an_answer_is_read_whatever_a_login_shell_printed_before():
    reply = parse_reply("n", b"Welcome\nbegin x\nbegin n\n" + MACHINE + b"gpu 0 ba-1-a\nend n ok\n")
    assert reply.result is Result.OK
    assert reply.machines == (HostMachine("ba-1-a", "i-0123456789ab", "running", 18000, 8, None, billed_seconds=3.0),)
    assert reply.taken == {"0"}
    assert reply.machines[0].machine("h").endpoint == "ssh://h/18000"
    (ended,) = parse_reply(
        "n", b"begin n\nmachine b i-0123456789ab ended 18000 - 7.00 boot-failed 2.50\nend n ok\n"
    ).machines
    assert (ended.slots, ended.ended_seconds, ended.machine("h").endpoint) == (None, 7.0, None)
    assert (ended.reason, ended.detail) == (EndReason.BOOT_FAILED, "")
    assert (ended.billed_seconds, ended.machine("h").billed_seconds) == (2.5, 2.5)
    (lost,) = parse_reply(
        "n", b"begin n\nmachine b i-0123456789ab ended 18000 - 7.00 host-restarted -\nend n ok\n"
    ).machines
    assert lost.machine("h").reason is EndReason.INTERRUPTED
    assert lost.billed_seconds is None
    assert lost.machine("h").describe_end() == "interrupted: the host was started anew"


def test_a_machine_whose_end_is_not_finished_says_so():
    ended = b"machine b i-0123456789ab ended 18000 - 7.00 terminated 2.50\n"
    first, second = parse_reply("n", b"begin n\n" + ended + b"failed-end b 3\n" + MACHINE + b"end n ok\n").machines
    assert (first.failed_ends, second.failed_ends) == (3, 0)
    assert second.machine("h").leftover == ""
    assert first.machine("h").leftover == (
        "host h: the end of b is not finished: its end command fails (tries: 3); GPUs stay taken"
    )
    assert first.machine("h").describe_end() == "terminated"


@pytest.mark.parametrize(
    "output",
    [
        b"",
        b"begin n\n" + MACHINE,
        b"begin n\nend n ok",
        b"begin n\nend n ok\nmore\n",
        b"begin m\nend m ok\n",
        b"begin n\nend n what\n",
        b"begin n\nmachine ../b i-0123456789ab running 18000 8 - - 3.00\nend n ok\n",
        b"begin n\nmachine b i-0123456789ab running 18000 8 - sold -\nend n ok\n",
        b"begin n\nmachine b i-0123456789ab running 1e9 8 - - -\nend n ok\n",
        b"begin n\ngpu 0 \xff\nend n ok\n",
        b"begin n\nfailed-end b many\nend n ok\n",
        b"x" * (LONGEST_REPLY + 1),
    ],
)
def test_any_other_answer_is_none(output: bytes):
    with pytest.raises(BadReply):
        parse_reply("n", output)


def test_an_inspection_is_read():
    lines = b"tool flock no\ntool setsid yes\ndisk 1024\ntime 1700000000\ncommand yes\ndriver yes\n"
    found = parse_inspection(
        parse_reply("n", b"begin n\n" + lines + b"seen 0, 81559, NVIDIA H100 80GB HBM3\nend n ok\n")
    )
    assert (found.missing_tools, found.command, found.disk_kib, found.clock) == (("flock",), True, 1024, 1700000000)
    assert found.gpus == (SeenGpu(0, 81559, "NVIDIA H100 80GB HBM3"),)
    nothing = parse_inspection(parse_reply("n", b"begin n\ndriver no\nend n ok\n"))
    assert (nothing.gpus, nothing.disk_kib, nothing.command) == (None, None, False)
    with pytest.raises(BadReply):
        parse_inspection(parse_reply("n", b"begin n\ndriver yes\nseen NVIDIA\nend n ok\n"))
