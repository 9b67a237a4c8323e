import pytest

from penstock.config import PrefillPriority
from penstock.plan.chunks import ChunkedPrefillConfig, create_prefill_chunks
from penstock.schedule.budget import LONGEST_PREFILL_WAIT, POLICIES
from penstock.schedule.prefill import Prefill, PrefillScheduler, StartDecode, YieldToDecode


def actions(scheduler, num_actions):
    """The first letters of the actions taken, committing every chunk."""
    taken = ""
    for _ in range(num_actions):
        action = scheduler.next_action()
        taken += {Prefill: "P", YieldToDecode: "Y", StartDecode: "S"}[type(action)]
        if isinstance(action, Prefill):
            scheduler.commit()
    return taken


@pytest.mark.parametrize(
    ("priority", "expected"),
    [
        (PrefillPriority.PREFILL_FIRST, "PPPPSS"),
        (PrefillPriority.INTERLEAVED, "PYPYPYPS"),
        (PrefillPriority.DECODE_PRIORITY, ("Y" * LONGEST_PREFILL_WAIT + "P") * 4 + "S"),
    ],
)
def test_the_three_priorities_differ_while_decodes_wait(priority, expected):
    scheduler = PrefillScheduler(range(400), ChunkedPrefillConfig(chunk_size=100, priority=priority))
    scheduler.decode_available = True
    assert actions(scheduler, len(expected)) == expected


@pytest.mark.parametrize("priority", list(PrefillPriority))
def test_without_decodes_every_priority_reads_on(priority):
    scheduler = PrefillScheduler(range(400), ChunkedPrefillConfig(chunk_size=100, priority=priority))
    assert actions(scheduler, 5) == "PPPPS"


@pytest.mark.parametrize("priority", list(PrefillPriority))
def test_a_prompt_waits_no_longer_than_the_starvation_bound(priority):
    scheduler = PrefillScheduler(range(1000), ChunkedPrefillConfig(chunk_size=10, priority=priority))
    scheduler.decode_available = True
    longest = max(run.count("Y") for run in actions(scheduler, 1500).split("P"))
    assert longest == POLICIES[priority].decode_turns_between_chunks


def test_progress_counts_what_was_committed_not_what_was_handed_out():
    scheduler = PrefillScheduler(range(100), ChunkedPrefillConfig(chunk_size=40))
    first = scheduler.next_action()
    assert scheduler.progress == 0.0
    assert scheduler.next_action() == first  # a failed chunk is handed out again
    scheduler.commit()
    assert scheduler.progress == pytest.approx(0.4)
    assert not scheduler.is_complete


def test_the_chunks_are_those_of_create_prefill_chunks():
    config = ChunkedPrefillConfig(chunk_size=64, overlap=7)
    scheduler = PrefillScheduler(range(500), config)
    handed_out = []
    while isinstance(action := scheduler.next_action(), Prefill):
        handed_out.append(action.chunk)
        scheduler.commit()
    assert handed_out == create_prefill_chunks(range(500), config)
    assert len(handed_out) == scheduler.total_chunks


def test_an_empty_prompt_is_complete():
    scheduler = PrefillScheduler([], ChunkedPrefillConfig())
    assert (scheduler.progress, scheduler.is_complete, scheduler.total_chunks) == (1.0, True, 0)
    assert scheduler.next_action() == StartDecode()


def test_memory_savings_follow_the_chunk():
    assert PrefillScheduler(range(1000), ChunkedPrefillConfig(chunk_size=100)).memory_savings == pytest.approx(0.9)
    assert PrefillScheduler(range(50), ChunkedPrefillConfig(chunk_size=100)).memory_savings == 0.0
