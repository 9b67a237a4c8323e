"""What sequences hold: blocks of keys and values, prefixes that others computed, and slots of recurrent state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix import PrefixCache, chain_hash, root_hash
from penstock.cache.states import StatePool
from penstock.config import CHECKPOINT_TOKENS
from penstock.request import Chunk, Request, SamplingParams, Sequence, StateUse
from penstock.schedule.moves import Moves

# Tokens of an answer for which a run of blocks has room from the start.
ORDINARY_ANSWER = 1024


@dataclass(slots=True, kw_only=True)
class Holdings:
    """Moves things between the pools and a sequence. Who gets them, and who loses them, the scheduler decides."""

    block_size: int
    pool: BlockPool
    prefix: PrefixCache | None
    states: StatePool | None  # None: the model has no recurrent state
    model_identity: str
    moves: Moves | None = None  # None: nothing goes to disk

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Every block and slot is owned exactly as often as it is counted."""
        sequences, moves = list(sequences), self.moves
        held_by_moves = [] if moves is None else list(moves.held_blocks())
        self.pool.check([*held_by_moves, *(block for sequence in sequences for block in sequence.block_ids)])
        if self.states is not None:
            held = [s.state_slot for s in sequences if s.state_slot is not None]
            pinned = [s.state_source for s in sequences if s.state_source is not None]
            self.states.check(held, [*pinned, *(() if moves is None else moves.pinned_states())])
        if moves is not None:
            moves.check()

    def awaits(self, sequence: Sequence) -> bool:
        """Whether what it needs is on its way from the disk."""
        return self.moves is not None and self.moves.awaits(sequence)

    @property
    def are_moving(self) -> bool:
        """Whether moves hold blocks, which come back when they end."""
        return self.moves is not None and self.moves.are_under_way

    def admit(self, sequence: Sequence) -> None:
        if self.states is not None:
            sequence.state_slot = self.states.acquire()
            whole = (fork // self.block_size * self.block_size for fork in sequence.request.forks)
            sequence.forks = tuple(sorted(set(whole)))

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Takes free blocks until `num_tokens` have a place; False when none is left before that."""
        while len(sequence.block_ids) * self.block_size < num_tokens:
            after = sequence.block_ids[-1] if sequence.block_ids else None
            block = self.pool.allocate(after=after, room=self._room(sequence))
            if block is None:
                return False
            sequence.block_ids.append(block)
        return True

    def _room(self, sequence: Sequence) -> int:
        """Blocks that it may still need: of its prompt, as far as it is known, and of an answer of ordinary length."""
        request = sequence.request
        num_answer = min(request.sampling.max_tokens, ORDINARY_ANSWER)
        num_tokens = request.num_slots(max(sequence.num_prompt_tokens + num_answer, len(sequence.tokens)))
        return max(1, -(-num_tokens // self.block_size) - len(sequence.block_ids))

    def start_over(self, sequence: Sequence) -> None:
        """Nothing of it is computed any more, but for what the caches keep as long as nobody needs the room."""
        sequence.num_seen = max(sequence.num_seen, sequence.num_computed)
        self._give_blocks_back(sequence)
        sequence.num_computed = sequence.num_scheduled = sequence.num_cached = sequence.num_remembered = 0
        sequence.state_is_current = False
        sequence.last_checkpoint = sequence.kept_checkpoint = sequence.stored_state = 0
        sequence.sought, sequence.awaited = range(0), frozenset()

    def release(self, sequence: Sequence) -> None:
        """Everything goes back to the pools; what was computed stays in the caches."""
        self._give_blocks_back(sequence)
        if self.states is not None and sequence.state_slot is not None:
            self.states.release(sequence.state_slot)
            sequence.state_slot = None

    def _give_blocks_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        self._unpin(sequence)

    def overlapped_start(self, sequence: Sequence, overlap: int) -> int:
        """Goes back over tokens this sequence computed itself, never into a block that another shares."""
        start = max(0, sequence.num_cached, sequence.num_computed - overlap)
        for index in range(sequence.num_computed // self.block_size, start // self.block_size - 1, -1):
            if index < len(sequence.block_ids) and self.pool.holders(sequence.block_ids[index]) > 1:
                return max(start, (index + 1) * self.block_size)
        return min(start, sequence.num_computed)

    # --- prefixes ---

    def take_hits(self, sequence: Sequence) -> None:
        """Takes the blocks that others computed, as far as the sequence can go on from them."""
        if not self._may_share(sequence):
            return
        if self.states is None:
            for block in self._known_blocks(sequence, len(sequence.block_ids)):
                if sequence.num_computed != len(sequence.block_ids) * self.block_size:
                    return
                self._take(sequence, block)
            if self.moves is not None and not self.moves.awaits(sequence):
                self.moves.seek(sequence, self._room(sequence))
        elif sequence.num_computed == 0 and not sequence.block_ids:
            self._start_at_checkpoint(sequence, self.states)

    def num_findable(self, sequence: Sequence) -> int:
        """Tokens after those it holds, of the ones known so far, that `take_hits` would find."""
        first = len(sequence.block_ids)
        is_on_border = sequence.num_scheduled == first * self.block_size
        if not is_on_border or not self._may_share(sequence) or (first and self.states is not None):
            return 0
        num_tokens = sum(self.block_size for _ in self._known_blocks(sequence, first))
        if self.moves is not None:
            first += num_tokens // self.block_size
            on_disk = max((slab.end for slab in self.moves.findable(sequence, first)), default=0)
            num_tokens = max(num_tokens, on_disk - sequence.num_scheduled)
        return num_tokens

    def next_block(self, sequence: Sequence) -> bytes | None:
        """The hash of the whole block that the sequence computes next; None where it would not be shared."""
        index = sequence.num_computed // self.block_size
        is_on_border = sequence.num_computed == len(sequence.block_ids) * self.block_size
        is_whole = (index + 1) * self.block_size < sequence.num_known
        if not is_on_border or not is_whole or self.states is not None or not self._may_share(sequence):
            return None
        return self._block_hash(sequence, index)

    def blocks_between(self, sequence: Sequence, start: int, end: int) -> Iterator[bytes]:
        """Hashes of the blocks that a prompt chunk computes, the last of them perhaps in part."""
        if self.prefix is not None:
            last = min(end, sequence.num_known - self.block_size) // self.block_size
            for index in range(start // self.block_size, last + 1):
                yield self._block_hash(sequence, index)

    def remember(self, sequence: Sequence) -> None:
        """The blocks that are now full can be found by others."""
        num_whole = sequence.num_computed // self.block_size
        if self.prefix is None or num_whole <= sequence.num_remembered:
            return
        for index in range(max(sequence.num_remembered, sequence.num_cached // self.block_size), num_whole):
            self.prefix.put(self._block_hash(sequence, index), sequence.block_ids[index])
        if self.moves is not None:
            self.moves.order_stores(sequence, sequence.num_remembered, num_whole)
        sequence.num_remembered = num_whole

    def pin(self, tokens: Tokens[int], *, rotary: str, scope: str, until: float, most: int) -> int:
        """Spares what is known of a prefix until then, `most` blocks in all; says how many tokens are known."""
        if self.prefix is None:
            return 0
        known = self.prefix.known(tokens, root_hash(self.model_identity, rotary, scope), self.block_size)
        self.prefix.pin(known, until=until, most=most)
        if self.states is not None and (last := next((h for h in reversed(known) if h in self.states), None)):
            self.states.spare(last, until=until)
        return len(known) * self.block_size

    def num_known(self, tokens: Tokens[int], *, rotary: str, scope: str) -> tuple[int, int]:
        """Counts the tokens of a prompt (that memory holds, that lie on disk behind them)."""
        if self.prefix is None or not tokens:
            return 0, 0
        root = root_hash(self.model_identity, rotary, scope)
        in_memory = len(self.prefix.known(tokens, root, self.block_size))
        if self.moves is None:
            return in_memory * self.block_size, 0
        request = Request(
            id=-1, prompt=tuple(tokens), sampling=SamplingParams(), arrived_at=0.0, rotary=rotary, scope=scope
        )
        asked = Sequence(request=request, tokens=list(tokens), num_prompt_tokens=len(tokens), prompt_is_complete=True)
        end = self.moves.end_on_disk(asked, in_memory)
        return in_memory * self.block_size, max(0, end - in_memory * self.block_size)

    def expire(self, now: float) -> None:
        self.pool.expire(now)
        if self.states is not None:
            self.states.expire(now)

    def _known_blocks(self, sequence: Sequence, first: int) -> Iterator[bytes]:
        """Hashes of the sequence's blocks from `first` on, as long as somebody computed them."""
        assert self.prefix is not None
        # At least one known token is computed: its logits are wanted, or the rest of a stream is read for its chunk.
        for index in range(first, (sequence.num_known - 1) // self.block_size):
            block_hash = self._block_hash(sequence, index)
            if block_hash not in self.prefix:
                return
            yield block_hash

    def _take(self, sequence: Sequence, block_hash: bytes) -> None:
        assert self.prefix is not None
        if sequence.num_computed >= sequence.num_seen:
            is_loaded = sequence.num_computed in sequence.sought
            reason = "disk" if is_loaded else self.prefix.why_kept(block_hash)
            sequence.hits = sequence.hits.plus(reason, self.block_size)
        block = self.prefix.take(block_hash)
        assert block is not None
        sequence.block_ids.append(block)
        sequence.num_computed += self.block_size
        sequence.num_scheduled = sequence.num_computed
        sequence.num_cached += self.block_size

    def _may_share(self, sequence: Sequence) -> bool:
        return self.prefix is not None and not sequence.request.sampling.needs_every_token

    def _block_hash(self, sequence: Sequence, index: int) -> bytes:
        """The chained hash of block `index`, extending the sequence's own list of them."""
        hashes, block_size = sequence.block_hashes, self.block_size
        while len(hashes) <= index:
            previous = hashes[-1] if hashes else self._root(sequence.request)
            start, end = len(hashes) * block_size, (len(hashes) + 1) * block_size
            media = [one.key for one in sequence.media_keys if one.start < end and start < one.end]
            hashes.append(chain_hash(previous, sequence.tokens[start:end], media))
        return hashes[index]

    def hash_before(self, sequence: Sequence, index: int) -> bytes:
        """The chained hash of all blocks before block `index`."""
        return self._block_hash(sequence, index - 1) if index else self._root(sequence.request)

    def _root(self, request: Request) -> bytes:
        return root_hash(self.model_identity, request.rotary, request.scope)

    # --- recurrent state ---

    def state_use(self, sequence: Sequence, end: int) -> StateUse | None:
        """Tells where the state of a chunk that ends at `end` comes from, and where it is saved."""
        if self.states is None:
            return None
        assert sequence.state_slot is not None, "a sequence that runs has a slot"
        is_saved = end % self.block_size == 0 and self._may_share(sequence)
        return StateUse(
            slot=sequence.state_slot,
            source=sequence.state_slot if sequence.state_is_current else sequence.state_source,
            save_to=self.states.acquire_checkpoint() if is_saved else None,
        )

    def commit_state(self, sequence: Sequence, chunk: Chunk) -> None:
        """The chunk was computed: the slot holds its state, and so does the checkpoint, if there is one."""
        if self.states is None or chunk.state is None:
            return
        sequence.state_is_current = True
        self._unpin(sequence)
        if chunk.state.save_to is None:
            return
        prefix = self._block_hash(sequence, chunk.end // self.block_size - 1)
        self.states.keep(prefix, chunk.state.save_to)
        if self.moves is not None:
            self.moves.order_state(sequence, chunk.end)
        self._thin_out(sequence, self.states, chunk.end)
        sequence.last_checkpoint = chunk.end

    def forgo_state(self, chunk: Chunk) -> None:
        """The chunk will not be computed, or was not: nothing is saved."""
        if self.states is not None and chunk.state is not None and chunk.state.save_to is not None:
            self.states.forgo(chunk.state.save_to)

    def _thin_out(self, sequence: Sequence, states: StatePool, end: int) -> None:
        """The checkpoint before the one just saved at `end` stays if prompts part there, or it is far from others."""
        last = sequence.last_checkpoint
        is_wanted = last in sequence.forks or last <= sequence.num_prompt_tokens < end  # the last of the prompt
        if is_wanted or last - sequence.kept_checkpoint >= CHECKPOINT_TOKENS:
            sequence.kept_checkpoint = last
        elif last > sequence.kept_checkpoint:
            states.drop(self._block_hash(sequence, last // self.block_size - 1))

    def _start_at_checkpoint(self, sequence: Sequence, states: StatePool) -> None:
        """The last one whose blocks are all there; a state alone is of no use to the attention layers.

        Where blocks go on behind it, two prompts part at their end: the next that comes this way finds a checkpoint.
        """
        blocks: list[bytes] = []
        num_usable = 0
        for block_hash in self._known_blocks(sequence, 0):
            blocks.append(block_hash)
            if block_hash in states:
                num_usable = len(blocks)
        if self.moves is not None and not self.moves.awaits(sequence):
            self.moves.seek_state(sequence, num_usable, self._room(sequence))
        if self.awaits(sequence):
            return
        for block_hash in blocks[:num_usable]:
            self._take(sequence, block_hash)
        if len(blocks) > num_usable:
            sequence.forks = tuple(sorted({*sequence.forks, len(blocks) * self.block_size}))
        if num_usable:
            sequence.state_source = states.pin(blocks[num_usable - 1])
            sequence.last_checkpoint = sequence.kept_checkpoint = sequence.num_computed

    def _unpin(self, sequence: Sequence) -> None:
        if self.states is not None and sequence.state_source is not None:
            self.states.unpin(sequence.state_source)
            sequence.state_source = None
