"""Moves, holdings and the index of the disk together, over pages and a disk that remember what was written."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_scheduler import BLOCK, advance_states, expected_output, feed, make_request, make_scheduler, next_token

from penstock.cache.slabs import SlabLayout
from penstock.cache.tiers import Tiers
from penstock.request import Moved, StepResult
from penstock.schedule.budget import NUM_FEATURES, StepCost, StepLoad
from penstock.schedule.moves import FIRST_OBSERVATIONS

LAYOUT = SlabLayout(block_size=BLOCK, row_bytes=(1 << 16,) * 2, state_bytes=(64,))
SLAB_BLOCKS = LAYOUT.blocks_per_slab


def name_of(slab):
    return slab.name_key.hex()


class Disk:
    """Slabs by name: the prefix that each of their tokens stands for, and the state after them."""

    def __init__(self):
        self.slabs = {}
        self.tiers = Tiers(LAYOUT, name_of)


class Work:
    """A scheduler whose model knows if it is shown another prefix, and moves that take their time."""

    def __init__(self, disk, *, num_checkpoints=None, **settings):
        self.scheduler = make_scheduler(num_checkpoints=num_checkpoints, **settings)
        self.disk, self.pages, self.states = disk, {}, None if num_checkpoints is None else {}
        self.begun, self.landed = deque(), []
        self.outputs, self.lengths = {}, {}
        disk.tiers = Tiers(LAYOUT, name_of)
        disk.tiers.lie_on_disk(disk.slabs)
        self.scheduler.use_disk(disk.tiers, StepCost([0.0] * NUM_FEATURES), 0)

    def move(self, *, fails=False):
        """Ends the first move: what a store takes is there, and what a load brings is written while others compute."""
        move = self.begun.popleft()
        slab, is_done = move.slab, not fails
        starts = [block * BLOCK + place for block in move.block_ids for place in range(BLOCK)]
        if move.kind == "store":
            held = [self.pages[start] for start in starts]
            assert [tokens[-1] for tokens in held] == list(slab.tokens), "another slab's pages are stored"
            state = self.states[move.state_slot] if slab.has_state else None
            assert state is None or state == held[-1], "a state of another prefix is stored"
            if is_done:
                self.disk.slabs[name_of(slab)] = (held, state)
        elif (found := self.disk.slabs.get(name_of(slab))) is None or fails:
            is_done = False
            self.pages.update((start, ["spoilt"]) for start in starts)
            self.disk.slabs.pop(name_of(slab), None)
        else:
            self.pages.update(zip(starts, found[0], strict=True))
            if slab.has_state:
                self.states[move.state_slot] = list(found[1])
        self.landed.append(Moved(move=move, is_done=is_done, num_bytes=int(is_done), elapsed_s=1e-3))

    def step(self, prompts):
        """False where nothing was planned."""
        feed(self.scheduler, prompts)
        plan = self.scheduler.next_step()
        if plan is None:
            return False
        self.begun.extend(plan.moves)
        if self.states is not None:
            advance_states(self.scheduler, plan, self.states)
        tokens, finished = {}, {}
        for chunk in plan.chunks:
            self._compute(chunk)
            sequence = self.scheduler.sequences[chunk.sequence_id]
            if chunk.wants_logits:
                tokens[sequence.id] = next_token(sequence.tokens[: chunk.end])
                self.outputs.setdefault(sequence.id, []).append(tokens[sequence.id])
                if len(self.outputs[sequence.id]) == self.lengths[sequence.id]:
                    finished[sequence.id] = "length"
        if not plan.chunks and self.begun and self.scheduler.has_work:
            self.move()
        moved, self.landed = tuple(self.landed), []
        self.scheduler.apply(
            StepResult(
                step=plan.step, token_by_sequence=tokens, finished=finished, elapsed_s=0.5, peak_bytes=0, moved=moved
            )
        )
        return True

    def _compute(self, chunk):
        sequence = self.scheduler.sequences[chunk.sequence_id]
        places = [sequence.block_ids[i // BLOCK] * BLOCK + i % BLOCK for i in range(chunk.end)]
        for i in range(chunk.start):
            assert self.pages[places[i]] == sequence.tokens[: i + 1], "a chunk attends to another prefix"
        being_moved = {block for move in self.begun for block in move.block_ids}
        assert not being_moved & {place // BLOCK for place in places[chunk.start :]}, "a step writes what is moved"
        for i in range(chunk.start, chunk.end):
            self.pages[places[i]] = sequence.tokens[: i + 1]

    def ask(self, prompt, num_generated=2, **values):
        request_id = len(self.lengths)
        self.lengths[request_id] = num_generated
        self.scheduler.submit(make_request(request_id, prompt, **values))
        return request_id

    def finish(self, prompts):
        for _ in range(3000):
            if not self.step(prompts) and not self.begun and not self.landed:
                break
            while self.begun:
                self.move()
        assert not self.scheduler.has_work, "a request never ended"
        self.scheduler.check()


def asked(disk, prompts, **settings):
    """Asks an engine of its own for each of the prompts at once; returns it."""
    work = Work(disk, **{"num_blocks": 64, "chunk_size": 16} | settings)
    for prompt in prompts:
        work.ask(prompt)
    work.finish(dict(enumerate(prompts)))
    for request_id, prompt in enumerate(prompts):
        assert work.outputs[request_id] == expected_output(prompt, 2)
    return work


class MovesMachine(RuleBasedStateMachine):
    """Requests over a small pool and a disk that is slow, damaged, shared and forgotten: answers are what they are."""

    num_checkpoints = None

    def __init__(self):
        super().__init__()
        self.disk = Disk()
        asked(
            self.disk, [[100 * seed + i for i in range(60)] for seed in range(2)], num_checkpoints=self.num_checkpoints
        )
        self.prompts, self.aborted = {}, set()
        self.work = self.new_work()

    def new_work(self):
        return Work(
            self.disk,
            num_blocks=40,
            chunk_size=7,
            overlap=2 if self.num_checkpoints is None else 0,
            num_checkpoints=self.num_checkpoints,
        )

    @rule(seed=st.integers(0, 2), length=st.integers(1, 60), num_generated=st.integers(1, 9), streamed=st.booleans())
    def submit(self, seed, length, num_generated, streamed):
        prompt = [seed * 100 + i for i in range(length)]
        request_id = self.work.ask(() if streamed else prompt, num_generated, prompt_is_complete=not streamed)
        self.prompts[request_id] = prompt

    @rule()
    def step(self):
        had_work = self.work.scheduler.has_work
        assert self.work.step(self.prompts) or not had_work, "work was there and nothing was planned"

    @precondition(lambda self: self.work.begun)
    @rule(fails=st.booleans())
    def move(self, fails):
        self.work.move(fails=fails)

    @precondition(lambda self: self.disk.slabs)
    @rule(data=st.data())
    def another_process_removes_one(self, data):
        self.disk.slabs.pop(data.draw(st.sampled_from(sorted(self.disk.slabs))))

    @rule()
    def look_at_the_folder(self):
        self.disk.tiers.lie_on_disk(self.disk.slabs)

    @precondition(lambda self: self.work.scheduler.sequences)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.work.scheduler.sequences)))
        self.work.scheduler.abort(request_id)
        self.aborted.add(request_id)

    @rule()
    def fail_a_step(self):
        plan = self.work.scheduler.next_step()
        if plan is not None:
            self.work.begun.extend(plan.moves)  # they had begun
            for chunk in plan.chunks if self.work.states is not None else ():
                self.work.states[chunk.state.slot] = self.work.states[chunk.state.save_to] = ["spoilt"]
            self.work.scheduler.fail(plan.step)

    @rule()
    def start_again(self):
        """The process is killed, and another finds the folder."""
        self.prompts, self.aborted = {}, set()
        self.work = self.new_work()

    @invariant()
    def everything_has_one_owner(self):
        self.work.scheduler.check()

    def teardown(self):
        self.work.finish(self.prompts)
        for request_id in set(self.prompts) - self.aborted:
            expected = expected_output(self.prompts[request_id], self.work.lengths[request_id])
            assert self.work.outputs[request_id] == expected


class StateMovesMachine(MovesMachine):
    num_checkpoints = 5


for machine in (MovesMachine, StateMovesMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestMoves = MovesMachine.TestCase
TestStateMoves = StateMovesMachine.TestCase

TEXT = list(range(60))


@pytest.mark.parametrize("num_checkpoints", [None, 5], ids=["attention", "recurrent"])
def test_a_prompt_that_another_process_read_is_read_from_its_last_slab_on(num_checkpoints):
    disk = Disk()
    asked(disk, [TEXT], num_checkpoints=num_checkpoints)
    work = asked(disk, [TEXT], num_checkpoints=num_checkpoints)
    assert work.scheduler.moves.use.loaded_tokens == 56
    assert work.scheduler.moves.use.stored_tokens <= LAYOUT.slab_tokens * 2, "only what is new"
    assert not work.scheduler.moves.are_under_way


def test_two_that_ask_for_the_same_wait_for_one_load():
    disk = Disk()
    asked(disk, [TEXT])
    use = asked(disk, [TEXT, TEXT]).scheduler.moves.use
    assert use.loaded_tokens <= len(TEXT)


def test_what_a_damaged_slab_held_is_computed_and_what_follows_it_is_loaded():
    disk = Disk()
    asked(disk, [TEXT])
    disk.slabs.pop(next(iter(disk.slabs)))
    work = Work(disk, num_blocks=64, chunk_size=16)
    disk.tiers.lie_on_disk({*disk.slabs, *(name_of(slab) for slab in [])})
    work.ask(TEXT)
    work.finish({0: TEXT})
    assert work.outputs[0] == expected_output(TEXT, 2)


def test_a_load_that_hangs_is_given_up_and_the_prompt_is_read():
    disk = Disk()
    asked(disk, [TEXT])
    work, now = Work(disk, num_blocks=64, chunk_size=16), [0.0]
    work.scheduler.moves.clock = lambda: now[0]
    work.ask(TEXT)
    assert work.step({})
    assert work.begun
    stuck, work.begun = work.begun, deque()
    assert work.step({})
    assert not work.outputs
    now[0] = 1e6
    for _ in range(10):
        work.step({})
    assert work.outputs[0] == expected_output(TEXT, 2)
    work.begun = stuck
    work.finish({})


def test_nothing_is_stored_that_is_read_again_faster_than_loaded():
    disk = Disk()
    work = Work(disk, num_blocks=64, chunk_size=16)
    moves = work.scheduler.moves
    for _ in range(FIRST_OBSERVATIONS):
        moves.observe(StepLoad().with_chunk(0, 16), 1e-6)
    work.ask(TEXT)
    work.finish({0: TEXT})
    assert not disk.slabs
    asked(disk, [TEXT])
    work = Work(disk, num_blocks=64, chunk_size=16)
    for _ in range(FIRST_OBSERVATIONS):
        work.scheduler.moves.observe(StepLoad().with_chunk(0, 16), 1e-6)
    work.ask(TEXT)
    work.finish({0: TEXT})
    assert not work.scheduler.moves.use.loaded_tokens
