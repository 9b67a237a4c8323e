"""Matrices in few bits: the codes of a GGUF, products with them, and prompts in chunks inside each format."""

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from logit_recorder import LogitRecorder
from stored_blocks import random_blocks
from tiny_models import prompt

from penstock.errors import InvalidSetting
from penstock.kernels import build
from penstock.kernels.calls import c_kernels
from penstock.models.gguf_blocks import from_gguf
from penstock.models.groups import grouped
from penstock.models.layers import Linear, wide_product
from penstock.models.quantization import LAYOUTS, matrix_bytes
from penstock.models.quantized import QuantizedMatrix, QuantizedRows

PROMPT = prompt(150)
OURS = (Type.Q8_0, Type.Q4_1)
MIXED = (Type.Q4_K, Type.Q4_K, Type.Q6_K), (Type.Q5_0, Type.Q8_0), (Type.Q2_K, Type.IQ4_XS, Type.Q3_K)
ROUNDED = 2e-4  # of the largest output: inputs beside codes are whole numbers of 12 to 15 bits where sums are wide
LARGEST_RATIO = 1.02  # of bytes held to bytes in a file
needs_kernels = pytest.mark.usefixtures("compiled")


@pytest.fixture(autouse=True)
def wanted():
    build.use("auto")


def bound():
    """Beside codes inputs are rounded where they become whole numbers, less than bfloat16 rounded them."""
    instructions = build.kernels().instructions
    return 4e-6 if instructions is None or instructions.id == "avx512" else ROUNDED


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantized_matrix(kind, num_outputs, num_inputs):
    matrix = QuantizedMatrix.empty([(kind, num_outputs)], num_inputs)
    matrix.parts[0].fill(np.arange(num_outputs), grouped(normal(num_outputs, num_inputs), kind))
    return matrix, torch.from_numpy(matrix.parts[0].values(np.arange(num_outputs)))


def stored_matrix(kinds, num_outputs, num_inputs):
    """A matrix with `num_outputs` of each type, and the gguf package's values of it."""
    matrix = QuantizedMatrix.empty([(kind, num_outputs) for kind in kinds], num_inputs)
    values = []
    for index, (kind, part) in enumerate(zip(kinds, matrix.parts, strict=True)):
        blocks = random_blocks(kind, num_outputs, num_inputs, seed=index)
        part.fill(part.first + np.arange(num_outputs), from_gguf(blocks, kind))
        values.append(quants.dequantize(blocks, kind))
    return matrix, torch.from_numpy(np.concatenate(values))


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_codes_of_a_gguf_are_kept_as_they_are(kind):
    blocks = random_blocks(kind, 40, 512)
    matrix = QuantizedMatrix.empty([(kind, 50)], 512)
    matrix.parts[0].fill(np.arange(7, 47), from_gguf(blocks, kind))
    assert np.array_equal(matrix.parts[0].values(np.arange(7, 47)), quants.dequantize(blocks, kind))
    assert not matrix.parts[0].values(np.arange(7)).any()


@needs_kernels
@pytest.mark.parametrize("choice", ["avx512", "avx2", "neon"])
@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_c_packs_rows_of_a_file_as_numpy_does(kind, choice):
    if not build.can_run(choice):
        pytest.skip(f"without {choice}")
    build.use(choice)
    blocks, order = random_blocks(kind, 50, 512), np.random.default_rng(3).permutation(50)
    ours, theirs = (QuantizedMatrix.empty([(kind, 30), (kind, 20)], 512) for _ in range(2))
    QuantizedRows(matrix=theirs, outputs_N=order).fill(0, from_gguf(blocks, kind))
    for first in (0, 17):
        rows = blocks[first : first + 17 if first == 0 else None]
        QuantizedRows(matrix=ours, outputs_N=order).pack(c_kernels(), first, rows)
    assert all(torch.equal(one.bytes, other.bytes) for one, other in zip(ours.parts, theirs.parts, strict=True))
    assert ours.parts[0].bytes.any()


@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_a_matrix_takes_what_it_takes_in_the_file(kind):
    matrix = QuantizedMatrix.empty([(kind, 160)], 768)
    assert matrix.num_bytes == matrix_bytes(kind, 160, 768)
    block_items, block_bytes = GGML_QUANT_SIZES[kind]
    assert matrix.num_bytes <= LARGEST_RATIO * (160 * 768 // block_items * block_bytes)


@needs_kernels
@pytest.mark.parametrize("num_inputs", [576, 3072, 7264, 8192, 14_336])
def test_the_workspace_of_a_step_serves_its_narrower_products_too(num_inputs):
    library = build.kernels().library
    for num_threads in (1, 16, 63):
        available = library.penstock_product_bytes(64, num_inputs, num_threads)
        for narrower in range(32, num_inputs + 1, 32):
            assert library.penstock_panels_bytes(narrower, num_threads) <= available


@needs_kernels
@pytest.mark.parametrize(
    "kinds", [*((kind,) for kind in LAYOUTS), *MIXED], ids=lambda kinds: "-".join(k.name for k in kinds)
)
def test_a_product_is_of_the_codes_and_the_same_for_any_number_of_rows(kinds):
    for num_outputs, num_inputs in ((16, 256), (88, 768), (37, 512)):
        matrix, values = stored_matrix(kinds, num_outputs, num_inputs)
        rows = torch.from_numpy(normal(210, num_inputs, seed=2)).bfloat16()
        expected = rows.double() @ values.double().T
        together = wide_product(rows, matrix)
        assert (together - expected).abs().max() < bound() * expected.abs().max()
        for count in (1, 2, 3, 7, 8, 9, 13, 31, 65, 97):
            assert torch.equal(wide_product(rows[:count], matrix), together[:count]), f"{count} rows"
            assert torch.equal(wide_product(rows[-count:], matrix), together[-count:]), f"the last {count} rows"
    torch.set_num_threads(3)
    assert torch.equal(wide_product(rows, matrix), together), "of three threads"
    bias = torch.from_numpy(normal(len(matrix), seed=1)).bfloat16()
    linear = Linear(weight_OI=matrix, bias_O=bias)
    assert torch.equal(linear(rows), (together + bias).bfloat16())
    added = torch.ones(len(rows), len(matrix), dtype=torch.bfloat16)
    linear.add_to(added, rows)
    assert torch.equal(added, (together + bias + 1).bfloat16())


@needs_kernels
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1, Type.Q5_0, Type.MXFP4], ids=lambda kind: kind.name)
def test_a_product_of_few_inputs_is_of_their_groups_alone(kind):
    matrix, values = stored_matrix([kind], 50, 96)
    rows = torch.from_numpy(normal(70, 96, seed=2)).bfloat16()
    expected = rows.double() @ values.double().T
    assert (wide_product(rows, matrix) - expected).abs().max() < bound() * expected.abs().max()


@needs_kernels
@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda kind: kind.name)
def test_rows_of_a_matrix_are_its_values_rounded_to_bfloat16(kind):
    matrix, values = stored_matrix([kind], 200, 512)
    wanted = [3, 199, 16]
    assert torch.equal(matrix.rows(torch.tensor(wanted), torch.bfloat16), values.bfloat16()[wanted])


@pytest.mark.parametrize("quantized", OURS, ids=lambda kind: kind.name)
def test_without_the_c_kernels_the_matrix_is_unpacked_tile_by_tile(quantized, monkeypatch):
    monkeypatch.setattr("penstock.models.quantization.TILE_VALUES", 48 * 96)
    matrix, values = quantized_matrix(quantized, 200, 96)
    assert [outputs.start for outputs, _ in matrix.tiles(torch.float32)] == [0, 48, 96, 144, 192]
    rows = torch.from_numpy(normal(70, 96, seed=2))
    expected = rows.double() @ values.double().T
    added = torch.ones(70, 200)
    Linear(weight_OI=matrix, bias_O=None).add_to(added, rows)
    assert (wide_product(rows, matrix) - expected).abs().max() < 1e-4
    assert (added - 1 - expected).abs().max() < 1e-4
    build.use("torch")
    found = wide_product(rows.bfloat16(), matrix)
    assert (found - expected).abs().max() <= 2**-6 * expected.abs().max()


def read(engine):
    recorder = LogitRecorder(engine)
    output = engine.generate(PROMPT, max_tokens=32, ignore_eos=True)
    return recorder.all, output.token_ids


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-mha-tied-bias", "gemma3"])
def test_chunks_equal_the_whole_prompt_inside_each_format(name, quantize, load):
    plain, _ = read(load(name, chunk_size=0))
    whole, tokens = read(load(name, chunk_size=0, quantize=quantize))
    error = (whole[0] - plain[0]).abs().max()
    assert 1e-3 < error < {"int8": 0.05, "int4": 0.6}[quantize] * plain[0].abs().max(), (
        "quantized, and still that model"
    )
    for chunk_size in (1, 7, 64):
        logits, found = read(load(name, chunk_size=chunk_size, quantize=quantize))
        assert (logits - whole).abs().max() <= 1e-4, f"chunk size {chunk_size}"
        assert found == tokens, f"chunk size {chunk_size}"


@needs_kernels
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_bfloat16_in_chunks_is_the_whole_prompt_bit_by_bit(quantize, load, compiled):
    exact, _ = read(load("llama", chunk_size=0, quantize=quantize))
    whole, tokens = read(load("llama", chunk_size=0, dtype="bfloat16", quantize=quantize))
    has_one_order = build.found(compiled).instructions.multiplies_all  # of unpacked matrices too
    for chunk_size in (7, 40, 64) if has_one_order else (40, 64):
        logits, found = read(load("llama", chunk_size=chunk_size, dtype="bfloat16", quantize=quantize))
        assert torch.equal(logits, whole), f"chunk size {chunk_size}"
        assert found == tokens
    allowed = 1.5 * (whole[0] - exact[0]).abs().max()
    # Single tokens attend in another order; few rows of an unpacked matrix are added up in one.
    for chunk_size in (1, 7):
        logits, _ = read(load("llama", chunk_size=chunk_size, dtype="bfloat16", quantize=quantize))
        assert (logits[0] - exact[0]).abs().max() <= allowed, f"chunk size {chunk_size}"


def test_the_memory_model_knows_what_packed_matrices_take(load):
    shapes = {quantize: load("llama", quantize=quantize).model.memory.shape for quantize in ("none", "int8", "int4")}
    engine = load("llama", quantize="int4")
    held = sum(
        weight.num_bytes if isinstance(weight, QuantizedMatrix) else weight.nbytes
        for weight in _weights(engine.model.lane.decoder)
    )
    norms = shapes["none"].num_parameters * 4 - sum(
        weight.nbytes for weight in _weights(load("llama").model.lane.decoder)
    )
    assert shapes["int4"].weight_bytes == held + norms
    assert shapes["int4"].weight_bytes < shapes["int8"].weight_bytes < shapes["none"].weight_bytes


def _weights(decoder):
    yield decoder.embeddings_VM
    if decoder.head_VM is not decoder.embeddings_VM:
        yield decoder.head_VM
    for layer in decoder.layers:
        for linear in (layer.mixer.qkv, layer.mixer.output, layer.mlp.first, layer.mlp.down):
            yield linear.weight_OI


def test_keep_needs_a_quantized_file(load):
    with pytest.raises(InvalidSetting, match="needs a GGUF file with quantized weights"):
        load("llama", quantize="keep")


def test_rows_that_are_not_there_are_refused():
    matrix, _ = quantized_matrix(Type.Q8_0, 200, 96)
    for wrong in (200, -1, 10**7):
        with pytest.raises(IndexError):
            matrix.rows(torch.tensor([3, wrong]), torch.bfloat16)
