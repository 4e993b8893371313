from hypothesis import given
from hypothesis import strategies as st

from batch_assets.catalog.ranges import ATTEMPTS, KeyRange, RangeRunRecord, pack
from batch_assets.orchestration.launch_plan import plan_launch

KEYS = [f"{i:05d}" for i in range(40)]


def test_sparse_gaps_are_packed_into_few_ranges():
    wanted = frozenset(KEYS[::4])
    assert pack(KEYS, wanted, [], batches_per_run=10) == [KeyRange("00000", "00036", wanted)]


def test_a_range_is_for_what_is_wanted_however_far_apart_that_is():
    (found,) = pack(KEYS, {KEYS[0], KEYS[39]}, [], batches_per_run=2)
    assert [key for key in KEYS if key in found] == [KEYS[0], KEYS[39]]
    assert pack(KEYS, set(KEYS[3:5]), [], batches_per_run=2) == [KeyRange("00003", "00004")]


def test_a_run_over_scattered_batches_holds_up_nothing_else_of_its_range():
    scattered = KeyRange("00000", "00039", frozenset({"00000", "00005", "00039"}))
    assert pack(KEYS, set(KEYS[:8]), [scattered], batches_per_run=6) == [
        KeyRange("00001", "00007", frozenset({"00001", "00002", "00003", "00004", "00006", "00007"}))
    ]


@given(
    wanted=st.sets(st.sampled_from(KEYS)),
    busy=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 6)), max_size=4),
    batches_per_run=st.integers(1, 12),
)
def test_every_free_wanted_key_is_covered_once_and_no_busy_key_is(wanted, busy, batches_per_run):
    running = [KeyRange(KEYS[start], KEYS[min(39, start + length)]) for start, length in busy]
    ranges = pack(KEYS, wanted, running, batches_per_run=batches_per_run)
    covered = [key for found in ranges for key in KEYS if key in found]
    assert set(covered) <= wanted
    assert len(covered) == len(set(covered))
    assert not [key for key in covered if any(key in run for run in running)]
    free = {key for key in wanted if not any(key in run for run in running)}
    assert free <= set(covered)
    assert all(sum(key in wanted for key in KEYS if key in found) <= batches_per_run for found in ranges)
    for most in range(len(ranges) + 2):
        assert pack(KEYS, wanted, running, batches_per_run=batches_per_run, most=most) == ranges[:most]


def launch(runs, **given):
    options = {"backfill_open": False, "batches_per_run": 10, "room": 4} | given
    return plan_launch("r", lambda: KEYS, dict.fromkeys(KEYS), runs, **options)


def test_nothing_is_started_beside_an_open_backfill():
    assert launch([], backfill_open=True).ranges == []


def test_nothing_is_started_after_a_cancel_of_this_request():
    canceled = RangeRunRecord("a", KeyRange("00000", "00009"), "canceled", "r")
    assert launch([canceled]).ranges == []
    assert launch([RangeRunRecord("a", KeyRange("00000", "00009"), "canceled", "another")]).ranges


def test_a_batch_in_flight_is_never_started_twice():
    running = RangeRunRecord("a", KeyRange("00000", "00019"), "unfinished", None)
    assert launch([running]).ranges == [KeyRange("00020", "00029"), KeyRange("00030", "00039")]


def test_a_batch_that_failed_often_enough_is_left_alone():
    failed = [RangeRunRecord(str(i), KeyRange("00000", "00019"), "failed", "r") for i in range(ATTEMPTS)]
    assert launch(failed).ranges == [KeyRange("00020", "00029"), KeyRange("00030", "00039")]
    assert launch(failed[1:]).ranges[0].first == "00000"
    retries = [RangeRunRecord(str(i), KeyRange("00000", "00019"), "failed", "r", "root") for i in range(ATTEMPTS)]
    assert launch(retries).ranges[0].first == "00000"


def test_a_batch_that_failed_scattered_runs_left_alone_is_tried():
    keys = KeyRange("00000", "00039", frozenset({"00000", "00039"}))
    failed = [RangeRunRecord(str(i), keys, "failed", "r") for i in range(ATTEMPTS)]
    assert launch(failed, batches_per_run=100).ranges == [KeyRange("00001", "00038")]


def test_of_a_repair_full_runs_start_at_once_and_the_rest_waits_while_a_run_is_queued():
    def repaired(queued, request="r"):
        busy = RangeRunRecord("a", KeyRange("00000", "00009"), "unfinished", request, queued=queued)
        return launch([busy], batches_per_run=20, repair=True).ranges

    full, rest = KeyRange("00010", "00029"), KeyRange("00030", "00039")
    assert repaired(queued=True) == [full]
    assert repaired(queued=True, request="another") == [full, rest]
    assert repaired(queued=False) == [full, rest]
    assert launch([], batches_per_run=30, repair=True).ranges[1:] == [rest]


def test_no_more_runs_than_there_is_room_for():
    assert len(launch([], room=2).ranges) == 2


def test_the_partitions_are_not_read_while_there_is_no_room_for_a_run():
    def keys():
        raise AssertionError("80,000 of them, at each look")

    running = [RangeRunRecord("a", KeyRange("00000", "00009"), "unfinished", "r")]
    found = plan_launch("r", keys, dict.fromkeys(KEYS), running, backfill_open=False, batches_per_run=10, room=1)
    assert (found.ranges, found.state) == ([], "open")
    assert found.reason == "40 batches wanted, 1 runs under way"
