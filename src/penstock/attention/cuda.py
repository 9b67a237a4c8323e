"""Attention over pages on a GPU, by our own Triton kernels: they need nothing but torch and what it brings.

A step's layout (tiles, lengths, slots, block table) goes to the device in one copy that the host does not wait for.
"""

# T tokens of the step, C chunks, H heads, K key-value heads, D head size, S slots

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from penstock.attention.backend import AttentionRule, ForwardInputs, HeadNorms, Rotation
from penstock.attention.flashinfer import FlashInferReader, WideChunks, obstacle, told_while_compiling
from penstock.attention.spans import attend_spans
from penstock.cache.storage import KvStorage
from penstock.errors import first_line
from penstock.kernels import triton_attention as triton_kernels
from penstock.kernels.overlap import overlap
from penstock.plan.waves import Waves

LEAST_ROWS = 16  # of a matrix product on tensor cores
MAX_SPLITS = 64  # a power of two
MIN_SPLIT_KEYS = 128
MAX_PARTIAL_BYTES = 64 * 2**20  # of the partial results of one launch
ALIGNED_ITEMS = 4  # int32 numbers of 16 bytes
TIMED_CHUNK, TIMED_CONTEXT, TIMED_RUNS = 2048, 8192, 4
PARTIAL_CHUNK = 256  # fills no wave, and has its keys split
HOPPER_SHARED_BYTES = 232_448
PADDING = -1  # a tile or a slot that nothing is computed for

_kernels: Any = triton_kernels  # a launch has no type that a checker knows


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """Rows are queries times the heads of a group; programs are those that a multiprocessor holds at once."""

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int
    programs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSet:
    """Tiles of one shape: [(chunk, first query)], and the keys that each sees without a window."""

    shape: TileShape
    tiles: torch.Tensor
    num_keys: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHeads:
    """The heads of a layer, and the tiles in which they are attended."""

    num_kv_heads: int
    group: int  # of query heads that share a key-value head
    size: int
    narrow: TileShape
    wide: TileShape

    @property
    def padded_size(self) -> int:
        return max(LEAST_ROWS, triton.next_power_of_2(self.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """One step on the device."""

    slots_T: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    tile_sets: Mapping[LayerHeads, tuple[TileSet, ...]]
    wide: WideChunks | None = None  # those that the reader attends for


def tile_shapes(
    group: int, head_size: int, dtype: torch.dtype, shared_bytes: int = HOPPER_SHARED_BYTES
) -> tuple[TileShape, TileShape]:
    """Chooses (narrow, wide): few queries of a decode wait for memory, chunks wait for math.

    `shared_bytes`: of a multiprocessor of the card, for one program.
    """
    least_rows = max(LEAST_ROWS, triton.next_power_of_2(group))
    padded_size = max(LEAST_ROWS, triton.next_power_of_2(head_size))
    if dtype == torch.float32:  # strict float32 has no tensor cores; small tiles keep it in registers
        num_keys = 32 if padded_size <= 128 else 16
        narrow = TileShape(num_rows=least_rows, num_keys=num_keys, num_warps=4, num_stages=1, programs=2)
        wide = TileShape(num_rows=max(32, least_rows), num_keys=num_keys, num_warps=4, num_stages=1, programs=2)
        return narrow, wide
    # Measured on an H200 over 32 heads of 128: few warps per program, several programs per multiprocessor.
    if padded_size > 256:  # not measured: what is summed fills the registers of eight warps
        narrow = TileShape(num_rows=least_rows, num_keys=16, num_warps=4, num_stages=2, programs=2)
        wide = TileShape(num_rows=max(64, least_rows), num_keys=32, num_warps=8, num_stages=2, programs=1)
    elif padded_size > 128:
        narrow = TileShape(num_rows=least_rows, num_keys=32, num_warps=2, num_stages=2, programs=4)
        wide = TileShape(num_rows=max(128, least_rows), num_keys=64, num_warps=8, num_stages=2, programs=1)
    else:
        narrow = TileShape(num_rows=least_rows, num_keys=64, num_warps=2, num_stages=3, programs=4)
        wide = TileShape(num_rows=max(128, least_rows), num_keys=64, num_warps=4, num_stages=3, programs=2)
    narrow, wide = (_fitting(shape, least_rows, padded_size, shared_bytes) for shape in (narrow, wide))
    return narrow, wide


def _fitting(shape: TileShape, least_rows: int, head_size: int, shared_bytes: int) -> TileShape:
    """The shape, or a smaller one where the card has less room for queries and the keys and values on their way."""
    for num_rows, num_keys in ((64, 32), (32, 32), (16, 16)):
        if _shared_bytes(shape, head_size) <= shared_bytes:
            break
        num_rows = max(least_rows, min(shape.num_rows, num_rows))
        shape = TileShape(num_rows=num_rows, num_keys=num_keys, num_warps=4, num_stages=2, programs=1)
    return shape


def _shared_bytes(shape: TileShape, head_size: int) -> int:
    """The most that compiling was seen to ask for: queries, and keys and values of every stage but a third."""
    return 2 * head_size * (shape.num_rows + 2 * shape.num_keys * min(2, shape.num_stages))


def num_splits(num_keys: np.ndarray, num_kv_heads: int, num_programs: int, largest: int) -> int:
    """How many programs share the keys of the longest tile so that `num_programs` at once have equal work."""
    fair_share = max(MIN_SPLIT_KEYS, float(num_keys.sum()) * num_kv_heads / num_programs)
    return int(max(1, min(num_keys.max() / fair_share, largest, MAX_SPLITS)))


class CudaAttention:
    def __init__(self, storage: KvStorage, block_size: int, *, num_heads: int) -> None:
        self.storage = storage
        self.block_size = block_size
        self.num_heads = num_heads
        self.device = storage.device
        self.num_processors, shared_bytes = 132, HOPPER_SHARED_BYTES
        if self.device.type == "cuda":
            card = torch.cuda.get_device_properties(self.device)
            self.num_processors, shared_bytes = card.multi_processor_count, card.shared_memory_per_block_optin
        known: dict[LayerHeads, LayerHeads] = {}
        found = (self._layer_heads(layer, shared_bytes) for layer in range(len(storage.keys)))
        self.heads = [known.setdefault(heads, heads) for heads in found]  # equal ones are the same
        self.head_size = max(heads.size for heads in self.heads)
        self._layout: StepLayout | None = None
        self._inputs: ForwardInputs | None = None  # of a step with images
        self._block_rows: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        self.reader: FlashInferReader | None = None  # None: our own kernels read wide chunks too
        self.name = "Triton"
        self.failure: str | None = None

    def _layer_heads(self, layer: int, shared_bytes: int) -> LayerHeads:
        num_kv_heads, size = self.storage.heads(layer)
        group = self.num_heads // num_kv_heads
        narrow, wide = tile_shapes(group, size, self.storage.keys[layer].dtype, shared_bytes)
        return LayerHeads(num_kv_heads=num_kv_heads, group=group, size=size, narrow=narrow, wide=wide)

    def for_decodes(self, *, max_rows: int, max_context: int) -> DecodeAttention:
        return DecodeAttention(
            self.storage, self.block_size, num_heads=self.num_heads, max_rows=max_rows, max_context=max_context
        )

    def for_pieces(self, *, max_rows: int) -> PiecewiseAttention:
        found = PiecewiseAttention(self.storage, self.block_size, num_heads=self.num_heads, max_rows=max_rows)
        found.reader = self.reader
        return found

    def pick_reader(self) -> None:
        """Leaves wide chunks to FlashInfer where it is installed and measures faster than our own kernel."""
        if (reason := obstacle(self.storage)) is not None:
            self.name = f"Triton alone; {reason}"
            return
        own_ms, partial_ms = self._chunk_ms(TIMED_CHUNK), self._chunk_ms(PARTIAL_CHUNK)
        try:
            self.reader = FlashInferReader(
                self.storage, self.block_size, num_heads=self.num_heads, num_processors=self.num_processors
            )
            with told_while_compiling():
                its_ms = self._chunk_ms(TIMED_CHUNK)
        except Exception as error:  # it compiles now, with tools that may be missing, and says so in many ways
            self.reader = None
            why = first_line(error, 200)
            self.failure = f"FlashInfer is installed but does not run ({why}); Triton reads wide chunks too"
            self.name = f"Triton alone; {self.failure}"
            return
        times = f"{its_ms:.2f} against {own_ms:.2f} ms for {TIMED_CHUNK:,} tokens"
        if its_ms > own_ms:
            self.reader = None
            self.name = f"Triton alone; FlashInfer is slower: {times}"
        else:
            self.name = f"Triton, and FlashInfer for wide chunks: {times}"
            if self.reader.waves is not None:
                ratio = self._own_ratio(self.reader.waves, partial_ms, its_ms)
                self.reader.waves = dataclasses.replace(self.reader.waves, own_ratio=ratio)

    def _timed_sizes(self, num_tokens: int) -> tuple[int, int]:
        """Tells (tokens, context) of a chunk that is timed, where the pages hold so many."""
        context = min(TIMED_CONTEXT, len(self.storage.keys[0]) // self.block_size * self.block_size)
        return min(num_tokens, context), context

    def _own_ratio(self, waves: Waves, own_ms: float, its_ms: float) -> float:
        """How many times as long our kernels take for a key of a token of a partial chunk as full waves do."""
        (own_count, context), (its_count, _) = self._timed_sizes(PARTIAL_CHUNK), self._timed_sizes(TIMED_CHUNK)
        own_keys = own_count * (context - own_count / 2)
        its_keys = waves.tokens_filled(its_count) * (context - its_count / 2)
        return max(1.0, (own_ms / own_keys) / (its_ms / its_keys))

    def _chunk_ms(self, num_tokens: int) -> float:
        """Times one layer's attention for a chunk, the least of a few; what is compiled now stalls no request."""
        count, context = self._timed_sizes(num_tokens)
        empty = torch.empty(0, dtype=torch.long)
        inputs = ForwardInputs(
            ids_T=empty,
            positions_T=empty,
            query_starts=(0, count),
            context_lens=(context,),
            block_table=(tuple(range(-(-context // self.block_size))),),
            rotary_variants=("default",),
            sequence_ids=(0,),
            logit_rows=empty,
        )
        size = self.heads[0].size
        q_THD = self.storage.keys[0].new_zeros(count, self.num_heads, size)
        rule = AttentionRule(scale=size**-0.5)
        self.begin_step(inputs)
        self.attend(0, q_THD, rule)  # compiles, and plans what all layers share
        times = []
        for _ in range(TIMED_RUNS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.attend(0, q_THD, rule)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)

    def begin_step(self, inputs: ForwardInputs) -> None:
        self._inputs = None if inputs.media is None else inputs
        starts = np.array(inputs.query_starts, dtype=np.int32)
        contexts = np.array(inputs.context_lens, dtype=np.int32)
        table = self._block_table(inputs)
        counts = np.diff(starts)
        wide = None
        if self.reader is not None:
            is_wide = counts > self.heads[0].narrow.num_rows // self.heads[0].group
            if self.reader.is_faster_for(counts[is_wide]):
                wide = WideChunks.of(np.flatnonzero(is_wide), starts, contexts, table, self.block_size)
                self.reader.begin_step(wide)
        groups = [of for heads in dict.fromkeys(self.heads) for of in _tile_groups(heads, counts, contexts)]
        slots = _slots(starts, contexts, table, self.block_size)
        parts = [slots, starts, contexts, table, *(tiles for *_, tiles, _ in groups)]
        slots_T, query_starts, context_lens, block_table, *tile_tensors = self._to_device(parts)
        tile_sets: dict[LayerHeads, tuple[TileSet, ...]] = dict.fromkeys(self.heads, ())
        for (heads, shape, tiles, num_keys), tensor in zip(groups, tile_tensors, strict=True):
            if len(tiles):
                tile_sets[heads] += (TileSet(shape=shape, tiles=tensor, num_keys=num_keys),)
        self._layout = StepLayout(
            slots_T=slots_T,
            query_starts=query_starts,
            context_lens=context_lens,
            block_table=block_table,
            wide=wide,
            tile_sets=tile_sets,
        )

    def store(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor | None,
        v_TKD: torch.Tensor | None,
        rotation: Rotation | None,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        layout, size = self._current_layout(), q_THD.shape[-1]
        assert rotation is None or (rotation.cos_T1R.is_contiguous() and rotation.sin_T1R.is_contiguous())
        num_kv_heads = 0 if k_TKD is None or v_TKD is None else k_TKD.shape[1]
        if k_TKD is None or v_TKD is None:
            k_TKD = v_TKD = q_THD  # of which no head is read
        q_THD, k_TKD, v_TKD = (_with_heads_together(x) for x in (q_THD, k_TKD, v_TKD))
        rotated_THD = self._place_of_queries(q_THD)
        num_half = 0 if rotation is None else rotation.cos_T1R.shape[-1]
        if norms is not None and 2 * num_half != size:  # the kernel norms what it rotates
            q_THD, k_TKD, norms = norms.q(q_THD), k_TKD if norms.k is None else norms.k(k_TKD), None
        keys, values = self.storage.keys[layer], self.storage.values[layer]
        if len(q_THD):
            _kernels.rotate_and_store[(len(q_THD),)](
                q_THD,
                k_TKD,
                v_TKD,
                q_THD if rotation is None else rotation.cos_T1R,
                q_THD if rotation is None else rotation.sin_T1R,
                q_THD if norms is None else norms.q.weight,
                q_THD if norms is None else (norms.k or norms.q).weight,
                0.0 if norms is None else norms.q.eps,
                layout.slots_T,
                rotated_THD,
                keys,
                values,
                q_THD.stride(0),
                k_TKD.stride(0),
                v_TKD.stride(0),
                keys.stride(0),
                NUM_HEADS=q_THD.shape[1],
                PADDED_HEADS=triton.next_power_of_2(q_THD.shape[1]),
                NUM_KV_HEADS=num_kv_heads,
                PADDED_KV_HEADS=triton.next_power_of_2(max(1, num_kv_heads)),
                SIZE=size,
                PADDED_SIZE=max(LEAST_ROWS, triton.next_power_of_2(size)),
                HALF=num_half,
                PADDED_HALF=triton.next_power_of_2(max(1, num_half)),
                HAS_NORMS=norms is not None,
                **overlap(len(q_THD)),
            )
        return rotated_THD

    def attend(
        self, layer: int, q_THD: torch.Tensor, rule: AttentionRule, sinks_H: torch.Tensor | None = None
    ) -> torch.Tensor:
        out_THD = torch.empty_like(q_THD)
        self.attend_into(out_THD, layer, q_THD, rule, sinks_H)
        return out_THD

    def attend_into(
        self,
        out_THD: torch.Tensor,
        layer: int,
        q_THD: torch.Tensor,
        rule: AttentionRule,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        layout = self._current_layout()
        reader = None
        if layout.wide is not None and sinks_H is None and rule.window is None and rule.softcap is None:
            reader = self.reader  # its other kernels would be compiled in the middle of a request
        if reader is not None:
            reader.attend(layer, q_THD, out_THD, rule)
        heads = self.heads[layer]
        for tile_set in layout.tile_sets[heads]:
            if reader is None or tile_set.shape is not heads.wide:
                self._attend_tiles(layer, q_THD, out_THD, rule, sinks_H, layout, tile_set)
        if self._inputs is not None:
            pages = self.storage.keys[layer], self.storage.values[layer]
            attend_spans(self._inputs, self.block_size, pages, q_THD, out_THD, rule)

    def _place_of_queries(self, q_THD: torch.Tensor) -> torch.Tensor:
        return torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)

    def _attend_tiles(
        self,
        layer: int,
        q_THD: torch.Tensor,
        out_THD: torch.Tensor,
        rule: AttentionRule,
        sinks_H: torch.Tensor | None,
        layout: StepLayout,
        tile_set: TileSet,
    ) -> None:
        shape, num_tiles, of_layer = tile_set.shape, len(tile_set.tiles), self.heads[layer]
        splits = self._num_splits(tile_set, rule.window, of_layer)
        num_partials = num_tiles * splits * of_layer.num_kv_heads * shape.num_rows if splits > 1 else 0
        partials = torch.empty(num_partials, of_layer.size, dtype=torch.float32, device=self.device)
        partial_lse = torch.empty(num_partials, dtype=torch.float32, device=self.device)
        keys = self.storage.keys[layer]
        heads = {"GROUP": of_layer.group, "SIZE": of_layer.size, "PADDED_SIZE": of_layer.padded_size}
        heads |= {"ROWS": shape.num_rows, "HAS_SINKS": sinks_H is not None}
        sinks = partial_lse if sinks_H is None else sinks_H
        _kernels.attend_tiles[(num_tiles, of_layer.num_kv_heads, splits)](
            q_THD,
            keys,
            self.storage.values[layer],
            out_THD,
            partials,
            partial_lse,
            sinks,
            tile_set.tiles,
            layout.query_starts,
            layout.context_lens,
            layout.block_table,
            layout.block_table.stride(0),
            q_THD.stride(0),
            keys.stride(0),
            splits,
            rule.scale if rule.softcap is None else rule.scale / rule.softcap,
            rule.softcap or 0.0,
            **heads,
            PAGE=self.block_size,
            KEYS=shape.num_keys,
            WINDOW=rule.window or 0,
            HAS_SOFTCAP=rule.softcap is not None,
            IS_SPLIT=splits > 1,
            **overlap(num_tiles),
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )
        if splits > 1:
            num_rows = shape.num_rows // of_layer.group * of_layer.group
            _kernels.merge_splits[(num_tiles, num_rows, of_layer.num_kv_heads)](
                partials,
                partial_lse,
                sinks,
                out_THD,
                tile_set.tiles,
                layout.query_starts,
                out_THD.stride(0),
                splits,
                **heads,
                PADDED_SPLITS=MAX_SPLITS,
                **overlap(num_tiles),
            )

    def _num_splits(self, tile_set: TileSet, window: int | None, heads: LayerHeads) -> int:
        shape = tile_set.shape
        num_keys = tile_set.num_keys if window is None else np.minimum(tile_set.num_keys, window + shape.num_rows)
        tile_bytes = heads.num_kv_heads * shape.num_rows * heads.size * 4
        largest = MAX_PARTIAL_BYTES // (len(num_keys) * tile_bytes)
        return num_splits(num_keys, heads.num_kv_heads, self.num_processors * shape.programs, largest)

    def _block_table(self, inputs: ForwardInputs) -> np.ndarray:
        """[C, blocks of the longest]. Rows are kept from step to step: most sequences have the blocks they had."""
        kept = {}
        for sequence_id, blocks in zip(inputs.sequence_ids, inputs.block_table, strict=True):
            row = self._block_rows.get(sequence_id)
            kept[sequence_id] = row if row is not None and row[0] == blocks else (blocks, np.array(blocks, np.int32))
        self._block_rows = kept
        table = np.zeros((len(inputs.block_table), max(map(len, inputs.block_table), default=0)), np.int32)
        for index, sequence_id in enumerate(inputs.sequence_ids):
            row = kept[sequence_id][1]
            table[index, : len(row)] = row
        return table

    def _to_device(self, parts: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """One copy for all of them; the host's side is pinned, so that nobody waits for it.

        Every part begins at an aligned address: Triton compiles a kernel anew for an argument that is not aligned.
        """
        sizes = [-(-part.size // ALIGNED_ITEMS) * ALIGNED_ITEMS for part in parts]
        packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        for part, place in zip(parts, packed.split(sizes), strict=True):
            place.numpy()[: part.size] = part.reshape(-1)
        places = packed.to(self.device, non_blocking=True).split(sizes)
        return [place[: part.size].view(part.shape) for part, place in zip(parts, places, strict=True)]

    def _current_layout(self) -> StepLayout:
        assert self._layout is not None, "begin_step comes first"
        return self._layout


class DecodeAttention(CudaAttention):
    """Attends in steps of single tokens, over buffers that never move: a CUDA graph can capture such a step."""

    def __init__(self, storage: KvStorage, block_size: int, *, num_heads: int, max_rows: int, max_context: int) -> None:
        super().__init__(storage, block_size, num_heads=num_heads)
        self.max_rows = max_rows
        self._max_context = max_context
        # Rows: slots, context lengths, and the chunk and first query of each tile, which is the row itself and 0.
        self._rows = torch.full((4, max_rows), PADDING, dtype=torch.int32, device=self.device)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=self.device)
        self._table = torch.zeros(max_rows, -(-max_context // block_size), dtype=torch.int32, device=self.device)

    def begin_step(self, inputs: ForwardInputs) -> None:
        count = inputs.num_chunks
        contexts = np.array(inputs.context_lens, dtype=np.int32)
        table = self._block_table(inputs)
        rows = np.full((4, self.max_rows), PADDING, dtype=np.int32)
        rows[0, :count] = _slots(np.arange(count + 1), contexts, table, self.block_size)
        rows[1, :count] = contexts
        tiles = rows[2:].reshape(-1, 2)
        tiles[:count, 0] = np.argsort(-contexts, kind="stable")
        tiles[:count, 1] = 0
        on_device, table_on_device = self._to_device([rows, table])
        self._rows.copy_(on_device)
        self._table[:count, : table.shape[1]].copy_(table_on_device)

    def forget_rows(self) -> None:
        self._rows.fill_(PADDING)

    def use_rows(self, num_rows: int) -> None:
        """The next launches cover that many rows; how keys are split depends on nothing else."""
        tiles, num_keys = self._rows[2:].reshape(-1, 2)[:num_rows], np.full(num_rows, self._max_context)
        tile_sets = {
            heads: (TileSet(shape=heads.narrow, tiles=tiles, num_keys=num_keys),) for heads in dict.fromkeys(self.heads)
        }
        self._layout = StepLayout(
            slots_T=self._rows[0, :num_rows],
            query_starts=self._starts,
            context_lens=self._rows[1],
            block_table=self._table,
            tile_sets=tile_sets,
        )


class PiecewiseAttention(CudaAttention):
    """Slots, queries and results of a step lie where they always lie: what is between attentions can be captured."""

    def __init__(self, storage: KvStorage, block_size: int, *, num_heads: int, max_rows: int) -> None:
        super().__init__(storage, block_size, num_heads=num_heads)
        self.max_rows = max_rows
        self._slots = torch.full((max_rows,), PADDING, dtype=torch.int32, device=self.device)
        self._queries: torch.Tensor | None = None  # of layers with larger heads and smaller ones, one after another
        self._attended: torch.Tensor | None = None

    def prepare(self) -> None:
        """Takes the memory, which an engine that never captures does not need."""
        dtype, num_values = self.storage.keys[0].dtype, self.max_rows * self.num_heads * self.head_size
        self._queries = torch.zeros(num_values, dtype=dtype, device=self.device)
        self._attended = torch.zeros_like(self._queries)

    def begin_step(self, inputs: ForwardInputs) -> None:
        super().begin_step(inputs)
        slots_T = self._current_layout().slots_T
        self._slots.fill_(PADDING)
        self._slots[: len(slots_T)].copy_(slots_T)

    def use_rows(self, num_rows: int) -> None:
        """Makes the next stores cover that many rows, for a capture."""
        slots_T = self._slots[:num_rows]
        self._layout = StepLayout(
            slots_T=slots_T, query_starts=slots_T, context_lens=slots_T, block_table=slots_T, tile_sets={}
        )

    def use_slots_of(self, num_rows: int) -> None:
        """Stores of this step cover that many rows, the padding among them."""
        self._layout = dataclasses.replace(self._current_layout(), slots_T=self._slots[:num_rows])

    def result(self, num_rows: int, layer: int) -> torch.Tensor:
        assert self._attended is not None, "prepare comes first"
        return self._view(self._attended, num_rows, self.heads[layer].size)

    def attend_rows(self, num_rows: int, layer: int, rule: AttentionRule, sinks_H: torch.Tensor | None) -> None:
        assert self._queries is not None, "prepare comes first"
        queries_THD = self._view(self._queries, num_rows, self.heads[layer].size)
        self.attend_into(self.result(num_rows, layer), layer, queries_THD, rule, sinks_H)

    def _view(self, values: torch.Tensor, num_rows: int, size: int) -> torch.Tensor:
        return values[: num_rows * self.num_heads * size].view(num_rows, self.num_heads, size)

    def _place_of_queries(self, q_THD: torch.Tensor) -> torch.Tensor:
        assert self._queries is not None, "prepare comes first"
        return self._view(self._queries, len(q_THD), q_THD.shape[-1])


def _with_heads_together(x_THD: torch.Tensor) -> torch.Tensor:
    """Lays a token's heads one after the other, as the kernels read them; tokens may lie apart."""
    return x_THD if x_THD.stride()[1:] == (x_THD.shape[-1], 1) else x_THD.contiguous()


def _tile_groups(
    heads: LayerHeads, counts_C: np.ndarray, contexts_C: np.ndarray
) -> list[tuple[LayerHeads, TileShape, np.ndarray, np.ndarray]]:
    """Lists (heads, shape, tiles, keys of each): those of long chunks first."""
    is_narrow = counts_C <= heads.narrow.num_rows // heads.group
    found = []
    for shape, chosen in ((heads.wide, ~is_narrow), (heads.narrow, is_narrow)):
        chunks = np.flatnonzero(chosen & (counts_C > 0))
        found.append((heads, shape, *_tiles(chunks, counts_C, contexts_C, shape.num_rows // heads.group)))
    return found


def _tiles(
    chunks: np.ndarray, counts_C: np.ndarray, contexts_C: np.ndarray, num_queries: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lists ([(chunk, first query)], keys of each): every query of these chunks once, the longest tiles first."""
    tiles_C = -(-counts_C[chunks] // num_queries)
    chunk_of_tile = np.repeat(chunks, tiles_C)
    index = np.arange(len(chunk_of_tile)) - np.repeat(np.cumsum(tiles_C) - tiles_C, tiles_C)
    first = index * num_queries
    counts = counts_C[chunk_of_tile]
    num_keys = contexts_C[chunk_of_tile] - counts + np.minimum(first + num_queries, counts)
    order = np.argsort(-num_keys, kind="stable")
    return np.stack([chunk_of_tile, first], 1).astype(np.int32)[order], num_keys[order]


def _slots(starts: np.ndarray, contexts_C: np.ndarray, table: np.ndarray, block_size: int) -> np.ndarray:
    """The slot of every token of the step."""
    counts_C = np.diff(starts)
    chunk_T = np.repeat(np.arange(len(counts_C)), counts_C)
    position_T = np.arange(starts[-1]) - starts[chunk_T] + (contexts_C - counts_C)[chunk_T]
    return (table[chunk_T, position_T // block_size] * block_size + position_T % block_size).astype(np.int32)
