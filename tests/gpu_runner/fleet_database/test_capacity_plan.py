"""What the capacity sensor keeps in the table `datasets`, as it was and is stored."""

from __future__ import annotations

import json

import pytest

from gpu_runner.fleet_database.capacity_plan import (
    Assignment,
    CapacityMemory,
    ControllerState,
    Pause,
    PauseKind,
    ToldAlert,
    memory_to_json,
    pause_to_json,
    read_memory,
    read_pause,
)

# As programs before MEMORY_VERSION wrote it: no version, and the field's names as they are today.
OLD = (
    '{"controller": {"offers": [["sim-a/r/h100 spot", 2], ["sim-b/r/l4", 1]], "tried": ["sim-b/r/l4"], '
    '"assignments": [{"instance": "ba-1", "successor": "sim-b/r/l4", "beside": true}]}, '
    '"alerts": {"late": {"at": 1000.5, "over": false}, "budget": {"at": 900, "over": true}}}'
)
MEMORY = CapacityMemory(
    ControllerState(
        (("sim-a/r/h100 spot", 2), ("sim-b/r/l4", 1)),
        ("sim-b/r/l4",),
        (Assignment("ba-1", "sim-b/r/l4", beside=True),),
    ),
    (ToldAlert("late", 1000.5), ToldAlert("budget", 900.0, over=True)),
)


def test_a_memory_of_an_older_program_is_read():
    assert read_memory(OLD) == MEMORY


def test_a_memory_is_written_with_its_version_and_read_back():
    text = memory_to_json(MEMORY)
    assert json.loads(text) == {"version": 1, **json.loads(OLD)}  # so an older program reads it, too
    assert read_memory(text) == MEMORY


@pytest.mark.parametrize("text", ["{}", '{"controller": {}, "alerts": {}}', '{"version": 1}'])
def test_nothing_kept_is_the_beginning(text: str):
    assert read_memory(text) == CapacityMemory()


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", "{", '{"version": 2, "controller": {"offers": {"a": 1}}}', '{"version": "x"}'),
        *('{"controller": {"offers": [["a"]]}}', '{"controller": {"offers": 1}}', '{"controller": []}'),
        '{"controller": {"assignments": [{"successor": "x"}]}}',
    ],
)
def test_what_cannot_be_read_or_is_of_a_later_version_is_the_beginning(text: str):
    assert read_memory(text) == CapacityMemory()


@pytest.mark.parametrize("alerts", ["1", '{"late": 1}', '{"late": {"at": "x", "over": false}}', '{"late": {}}', "[1]"])
def test_alerts_that_cannot_be_read_are_told_again_and_the_controller_goes_on(alerts: str):
    kept = json.loads(OLD)["controller"]
    found = read_memory(f'{{"controller": {json.dumps(kept)}, "alerts": {alerts}}}')
    assert (found.controller, found.alerts) == (MEMORY.controller, ())


@pytest.mark.parametrize("pause", [None, *(Pause(kind, "0.01 $ are left") for kind in PauseKind)])
def test_a_pause_is_read_back(pause: Pause | None):
    assert read_pause(pause_to_json(pause)) == pause


@pytest.mark.parametrize("text", ["budget reached: 0.01 $ are left", "[1]", "{}", "12"])
def test_a_pause_of_an_older_program_is_its_sentence(text: str):
    assert read_pause(text) == Pause(PauseKind.BUDGET_REACHED, text)


def test_a_pause_of_a_later_program_stays_a_pause():
    later = read_pause('{"kind": "maintenance", "text": "until Monday", "more": 1}')
    assert later == Pause(PauseKind.UNKNOWN, "until Monday")
    assert Pause(PauseKind.LEASE_REFUSED, "").describe() == "lease refused"
