"""What captured steps of a GPU keep, as it is planned."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.memory import AttentionTiling, MemoryModel, ModelShape
from penstock.plan.recordings import CHUNK_SIZES, DECODE_SIZES, DRIVER_BYTES, captured_size, recording_bytes

SHAPE = ModelShape(
    num_layers=4,
    num_recurrent_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    intermediate_size=128,
    vocab_size=1000,
    num_parameters=200_000,
    largest_matrix=64 * 256,
    dtype_bytes=2,
    max_context=100_000,
)
MEMORY = MemoryModel(
    shape=SHAPE, tiling=AttentionTiling(query_rows=64, key_rows=64), runtime_bytes=1_000_000, block_size=16
)


@given(st.integers(1, 10_000))
def test_a_step_is_padded_to_the_next_size_that_is_captured(num_tokens):
    size = captured_size(num_tokens)
    assert size in CHUNK_SIZES
    assert size >= min(num_tokens, CHUNK_SIZES[-1])
    assert all(other < num_tokens for other in CHUNK_SIZES if other < size)


@given(st.integers(1, DECODE_SIZES[-1]), st.integers(0, CHUNK_SIZES[-1]), st.integers(0, 500))
def test_wider_steps_keep_more_and_every_capture_counts(most_decodes, most_chunks, more):
    kept = recording_bytes(MEMORY, most_decodes=most_decodes, most_chunks=most_chunks)
    assert kept <= recording_bytes(MEMORY, most_decodes=most_decodes, most_chunks=most_chunks + more)
    num_sizes = len([size for size in DECODE_SIZES if size < most_decodes]) + 1
    decodes = MEMORY.layer_bytes(most_decodes) + num_sizes * DRIVER_BYTES
    # The layer that attends parts each of the others into two pieces.
    pieces = 2 * (len([size for size in CHUNK_SIZES if size < most_chunks]) + 1) * DRIVER_BYTES if most_chunks else 0
    assert kept == decodes + MEMORY.layer_bytes(most_chunks) + pieces
