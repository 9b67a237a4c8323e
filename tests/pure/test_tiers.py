"""Slabs on disk: what comes back is what was stored or a miss, the budget holds, and every pin has an owner."""

import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from damaged_slabs import LAYOUT, NAMESPACE, damages, memory, payload, slab_at
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.cache.disk import DiskTier, verified
from penstock.cache.folder import CacheFolder
from penstock.cache.slabs import SlabLayout, decode_header, encode_header, header_bytes
from penstock.cache.tiers import Tiers, keep_rank

TESTS = Path(__file__).parents[1]


def tier(folder, *, budget=1 << 30, namespace=NAMESPACE, notes=None, **changes):
    note = (lambda _: None) if notes is None else notes.append
    made = DiskTier(CacheFolder(folder), namespace, LAYOUT, budget, note, **changes)
    made.open({"model": "tiny"})
    return made


def store(disk, slab, used_at=1.0, spared=()):
    return disk.write(slab, payload(slab), used_at, spared)


def found(disk, slab):
    """What a read gives: the bytes, or None."""
    targets = memory(slab)
    return b"".join(piece for pieces in targets for piece in pieces) if disk.read(slab, targets, 2.0) else None


def stored(slab):
    return b"".join(piece for pieces in payload(slab) for piece in pieces)


def du(folder):
    """Counts what the folder takes, while others may change it."""
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in ("", *folders, *files):
            with suppress(FileNotFoundError):
                total += 0 if name in folders else Path(parent, name).lstat().st_blocks * 512
    return total


@given(st.integers(0, 2**40), st.lists(st.integers(0, 2**32 - 1), max_size=300), st.booleans())
def test_a_header_says_again_what_it_was_told(first, tokens, has_state):
    slab = slab_at(0, first=first, tokens=tuple(tokens), has_state=has_state)
    sections = LAYOUT.sections(slab)
    data = encode_header(slab, NAMESPACE, sections, range(len(sections)))
    header = decode_header(data)
    assert len(data) == header_bytes(len(tokens), len(sections))
    assert (header.slab, header.sections, header.namespace) == (slab, sections, NAMESPACE)


def test_slabs_have_a_megabyte_or_the_tokens_that_tiny_models_share():
    smollm2 = SlabLayout(block_size=16, row_bytes=(384,) * 60)
    assert (smollm2.slab_tokens, smollm2.slab_tokens * 23_040 >= 2**20) == (48, True)
    assert SlabLayout(block_size=16, row_bytes=(16,) * 4).slab_tokens == 256
    assert SlabLayout(block_size=16, row_bytes=(2048,) * 72).blocks_per_slab == 1


def test_what_was_stored_is_found_by_the_next_process(tmp_path):
    slabs = [slab_at(index, has_state=index == 2) for index in range(3)]
    assert all(store(tier(tmp_path), slab) for slab in slabs)
    disk = tier(tmp_path)
    assert [found(disk, slab) for slab in slabs] == [stored(slab) for slab in slabs]
    assert all(verified(path, disk.folder) for path in disk.path.glob("*.kv"))
    assert found(disk, slab_at(2)) is None, "without its state it is another slab"


def test_nothing_is_found_under_another_namespace_prefix_or_ids(tmp_path):
    slab = slab_at(1)
    store(tier(tmp_path), slab)
    assert found(tier(tmp_path, namespace=b"another namespac"), slab) is None
    disk = tier(tmp_path)
    for other in (
        slab_at(1, previous=b"p" * 16),
        slab_at(1, first=slab.first + 16),
        slab_at(1, tokens=(*slab.tokens[:-1], slab.tokens[-1] + 1)),
    ):
        store(disk, slab)
        assert found(disk, other) is None
    store(disk, slab)
    assert found(disk, slab) == stored(slab), "the control"


def test_damage_is_a_miss_and_the_slab_can_be_stored_again(tmp_path):
    disk, slab = tier(tmp_path), slab_at(0, has_state=True)
    store(disk, slab)
    path = next(disk.path.glob("*.kv"))
    whole = path.read_bytes()
    for damaged in damages(whole, 600, seed=1):
        path.write_bytes(damaged)
        assert found(disk, slab) in (None, stored(slab))
        assert verified(path, disk.folder) is False or damaged == whole
    for odd in (b"", whole + b"\0"):
        path.write_bytes(odd)
        assert found(disk, slab) is None
    assert not path.exists()
    assert store(disk, slab)
    assert found(disk, slab) == stored(slab)


def test_the_budget_holds_temporary_files_included_and_the_least_used_goes_first(tmp_path):
    budget = 200_000
    disk = tier(tmp_path, budget=budget)
    first, *others = [slab_at(index) for index in range(40)]
    for index, slab in enumerate([first, *others]):
        assert store(disk, slab, used_at=10.0 + index, spared={disk.name(first)})
        assert du(tmp_path) <= budget
    kept = [slab for slab in others if found(disk, slab) is not None]
    assert kept == others[-len(kept) :], "the oldest left"
    assert found(disk, first) is not None, "it was about to be read"
    assert not store(tier(tmp_path / "small", budget=5_000), first)


def test_what_a_killed_writer_left_is_counted_and_removed(tmp_path):
    disk = tier(tmp_path, budget=100_000)
    (disk.path / "half.tmp").write_bytes(b"x" * 80_000)
    with disk.folder.locked() as room:
        room.set_total(10**9)
    assert store(tier(tmp_path, budget=100_000), slab_at(0))
    assert not list(disk.path.glob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_read_and_said_once(tmp_path):
    slab, notes, now = slab_at(0), [], [0.0]
    disk = tier(tmp_path, notes=notes, clock=lambda: now[0])
    assert store(disk, slab)
    moved = disk.path.rename(tmp_path / "kv" / "elsewhere")
    assert not store(disk, slab_at(1))
    assert not store(disk, slab_at(1))
    moved.rename(disk.path)
    assert not store(disk, slab_at(1)), "it rests for a while"
    assert found(disk, slab) == stored(slab)
    now[0] += 61
    assert store(disk, slab_at(1))
    assert len(notes) == 1
    assert "No such file" in notes[0]


def test_two_processes_share_a_folder(tmp_path):
    one, two = tier(tmp_path), tier(tmp_path)
    assert two.has_changed is True
    assert two.has_changed is False
    assert store(one, slab_at(0))
    assert two.has_changed is True
    assert list(two.names()) == [one.name(slab_at(0))]
    assert store(two, slab_at(0)), "it is there already"
    assert found(two, slab_at(0)) == stored(slab_at(0))
    one.folder.clear()
    assert found(two, slab_at(0)) is None


def test_of_two_prefixes_the_one_that_saves_more_stays_and_ends_leave_before_beginnings():
    old, new = (keep_rank(t, saved_s=0.05, num_bytes=2**20, depth=0) for t in (100.0, 200.0))
    assert old < new
    assert keep_rank(100.0, saved_s=0.5, num_bytes=2**20, depth=0) > new, "ten times the work for its bytes"
    chain = [keep_rank(100.0, saved_s=0.05, num_bytes=2**20, depth=depth) for depth in range(4)]
    assert chain == sorted(chain, reverse=True)
    assert keep_rank(100.0, saved_s=1e9, num_bytes=1, depth=0) < 100.0 + 31 * 86_400


def test_a_slow_disk_is_not_read_where_reading_the_prompt_is_faster():
    tiers = Tiers(LAYOUT, lambda slab: slab.key.hex())
    slab = slab_at(0)
    assert tiers.worth_loading([slab], None)
    assert not tiers.worth_loading([], 1.0)
    tiers.bytes_per_s = LAYOUT.file_bytes(slab) / 0.5
    assert tiers.worth_loading([slab], 0.6)
    assert not tiers.worth_loading([slab], 0.4)


SLABS = [slab_at(index) for index in range(6)]


class TierMachine(RuleBasedStateMachine):
    """The index beside a real folder: what it says is there is there, or is a miss; a second process interferes."""

    def __init__(self):
        super().__init__()
        self.at = Path(tempfile.mkdtemp())
        self.budget = 60_000
        self.disk, self.other = tier(self.at, budget=self.budget), tier(self.at, budget=self.budget)
        self.tiers = Tiers(LAYOUT, self.disk.name)
        self.storing, self.loading = [], []

    def teardown(self):
        shutil.rmtree(self.at)

    @rule(slab=st.sampled_from(SLABS))
    def begin_store(self, slab):
        if self.tiers.lacks(slab):
            self.tiers.begin_store(slab)
            self.storing.append(slab)

    @precondition(lambda self: self.storing)
    @rule(used_at=st.integers(1, 99))
    def end_store(self, used_at):
        slab = self.storing.pop(0)
        is_stored = store(self.disk, slab, float(used_at), self.tiers.pinned)
        self.tiers.end_store(slab, is_stored=is_stored)

    @rule(slab=st.sampled_from(SLABS))
    def begin_load(self, slab):
        if self.tiers.finds(slab):
            self.tiers.pin([slab])
            self.loading.append(slab)

    @precondition(lambda self: self.loading)
    @rule()
    def end_load(self):
        slab = self.loading.pop(0)
        read = found(self.disk, slab)
        assert read in (None, stored(slab))
        self.tiers.end_load(slab, is_loaded=read is not None, elapsed_s=0.001)

    @rule(slab=st.sampled_from(SLABS), used_at=st.integers(1, 99))
    def another_process_stores(self, slab, used_at):
        store(self.other, slab, float(used_at))

    @rule()
    def look_again(self):
        if self.disk.has_changed:
            self.tiers.lie_on_disk(self.disk.names())

    @precondition(lambda self: list(self.disk.names()))
    @rule(bit=st.integers(0, 10_000))
    def damage(self, bit):
        path = next(self.disk.path.glob("*.kv"))
        data = bytearray(path.read_bytes())
        data[bit % len(data)] ^= 1 << bit % 8
        path.write_bytes(data)

    @invariant()
    def pins_and_stores_have_owners(self):
        self.tiers.check(self.loading, self.storing)

    @invariant()
    def the_budget_holds(self):
        assert du(self.at) <= self.budget


TestTiers = TierMachine.TestCase
TestTiers.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)


@pytest.mark.evidence
def test_a_hundred_thousand_damaged_slabs_are_misses_or_the_exact_bytes(tmp_path):
    disk, slab = tier(tmp_path), slab_at(0, has_state=True)
    store(disk, slab)
    path = next(disk.path.glob("*.kv"))
    whole, hits = path.read_bytes(), 0
    for damaged in damages(whole, 100_000, seed=2):
        path.write_bytes(damaged)
        read = found(disk, slab)
        assert read in (None, stored(slab))
        hits += read is not None
        assert read is None or damaged == whole
    print(f"100,000 damaged slabs: {hits} that were not damaged were found, no other")


@pytest.mark.evidence
def test_a_thousand_killed_writers_leave_whole_slabs_within_the_budget(tmp_path):
    budget, drawn, found_whole = 200_000, random.Random(3), 0
    for seed in range(1_000):
        command = [sys.executable, TESTS / "killed_writer.py", tmp_path, str(budget), str(seed)]
        writer = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"begun\n"
        select.select([writer.stdout], [], [], drawn.random() * 0.05)  # nothing comes: it is a wait
        assert du(tmp_path) <= budget
        writer.kill()
        writer.communicate()
        assert du(tmp_path) <= budget
        disk = tier(tmp_path, budget=budget)
        for index in range(60):
            slab = slab_at(index, has_state=index % 3 == 0)
            read = found(disk, slab)
            assert read in (None, stored(slab))
            found_whole += read is not None
        assert not list(disk.path.glob("*.tmp"))
    print(f"1,000 kills: {found_whole} slabs read after them, all whole")
