"""Experts and recurrent layers of a GGUF that stay in few bits: their values, and prompts in chunks."""

from collections.abc import Callable
from itertools import cycle

import gguf_models
import pytest
import tiny_models
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf_models import CASES, write_gguf
from logit_recorder import LogitRecorder
from tiny_models import prompt, save_tiny_model

from penstock.engine.engine import Engine
from penstock.models.experts import Experts
from penstock.models.quantized import QuantizedMatrix, QuantizedRows

WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}
SHARED = {"shared_expert_intermediate_size": 256}
DELTA = {"linear_value_head_dim": 128, "linear_key_head_dim": 32}
NEMOTRON = {"mamba_head_dim": 32, "moe_shared_expert_intermediate_size": 256}
SIZES = {
    "mixtral": {},
    "qwen2moe": SHARED,
    "qwen3moe": {},
    "gpt-oss": {},
    "gemma4, experts": {"global_head_dim": 128},
    "granitehybrid": {"shared_intermediate_size": 256, "mamba_d_head": 64},
    "lfm2moe": {},
    "qwen35moe, three of a key": SHARED | DELTA,
    "qwen3next": SHARED | DELTA,
    "nemotron_h_moe": NEMOTRON,
}
# Gates and what they gate in types of their own, as llama.cpp mixes them, and as it does not.
KINDS = (
    Type.Q4_K,
    Type.Q6_K,
    Type.Q5_K,
    Type.Q3_K,
    Type.Q8_0,
    Type.IQ4_XS,
    Type.Q2_K,
    Type.Q5_0,
    Type.MXFP4,
    Type.Q4_1,
)
RECURRENT = {"granitehybrid", "lfm2moe", "qwen35moe, three of a key", "qwen3next", "nemotron_h_moe"}
PROMPT = prompt(70)
LATER = {"mixtral", "qwen2moe", "qwen3next", "lfm2moe", "gemma4, experts"}
CASES_HERE = [pytest.param(case, marks=pytest.mark.evidence if case in LATER else ()) for case in SIZES]


@pytest.fixture
def write(tmp_path, monkeypatch) -> Callable:
    """Writes a tiny model in types that are taken by turns."""

    def made(case: str, kinds=KINDS, **values):
        architecture, plain = CASES[case]

        def config():
            real = tiny_models._config
            with monkeypatch.context() as patch:
                for module in (tiny_models, gguf_models):
                    patch.setattr(module, "_config", lambda name, **given: real(name, **given | WIDE | values))
                return plain()

        monkeypatch.setitem(tiny_models.CONFIGS, case, config)
        save_tiny_model(case, tmp_path)
        turns = cycle(kinds)
        return write_gguf(tmp_path, architecture, tmp_path / "model.gguf", lambda name: next(turns))

    return made


def read(path, **settings):
    usual = {"memory": "4GiB", "threads": 1, "dtype": "float32", "chunk_size": 0}
    with Engine.load(str(path), **usual | settings) as engine:
        recorder = LogitRecorder(engine)
        tokens = engine.generate(PROMPT, max_tokens=8, ignore_eos=True).token_ids
        return recorder.all, tokens


@pytest.mark.parametrize("case", CASES_HERE)
def test_codes_of_experts_are_the_values_of_the_file(case, write):
    path = write(case, **SIZES[case])
    expanded, tokens = read(path, quantize="none")
    kept, found = read(path, quantize="keep")
    assert (kept - expanded).abs().max() <= 1e-4 * expanded.abs().max().clamp(min=1)
    assert found == tokens


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", CASES_HERE)
def test_chunks_through_quantized_experts_are_the_whole_prompt_bit_by_bit(case, write):
    path = write(case, **SIZES[case])
    exact, _ = read(path, quantize="none")
    whole, tokens = read(path, dtype="bfloat16")
    # Rounding lets a router choose other experts now and then, with or without codes.
    assert torch.cosine_similarity(whole[0], exact[0], dim=0) > 0.5, "in bfloat16, and still that model"
    # Recurrences are added up 64 tokens at a time, whatever the weights are.
    for chunk_size in (64,) if case in RECURRENT else (24, 40):
        logits, found = read(path, dtype="bfloat16", chunk_size=chunk_size)
        assert torch.equal(logits, whole), f"chunk size {chunk_size}"
        assert found == tokens


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "kinds", [(Type.Q4_K, Type.Q4_K, Type.Q6_K), (Type.MXFP4,), (Type.Q8_0, Type.Q2_K, Type.IQ4_NL)]
)
def test_a_mixture_of_codes_gives_the_same_for_any_number_of_rows(kinds, write):
    with Engine.load(
        str(write("qwen3moe", kinds, num_experts=5)), memory="4GiB", threads=1, dtype="bfloat16"
    ) as engine:
        experts = engine.model.lane.decoder.layers[0].mlp
    assert isinstance(experts, Experts)
    assert isinstance(experts.gate_up, QuantizedMatrix)
    assert isinstance(experts.down, QuantizedMatrix)
    rows = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    together = experts(rows)
    weights, chosen = experts.route(rows)
    one_by_one = torch.cat([experts._of_one(rows[[at]], weights[[at]], chosen[[at]]) for at in range(9)])
    assert (one_by_one - together[:9]).abs().max() <= 2**-5 * together.abs().max(), "what torch makes of them"
    for count in (1, 2, 3, 8, 17, 65, 97):
        assert torch.equal(experts(rows[:count]), together[:count]), f"{count} rows"
        assert torch.equal(experts(rows[-count:]), together[-count:]), f"the last {count} rows"
    torch.set_num_threads(3)
    assert torch.equal(experts(rows), together), "of three threads"


def test_the_memory_model_counts_experts_and_recurrent_layers_as_they_are_kept(write):
    case = "qwen35moe, three of a key"
    with Engine.load(str(write(case, **SIZES[case])), memory="4GiB", dtype="bfloat16") as engine:
        shape, decoder = engine.model.memory.shape, engine.model.lane.decoder
    destinations = dict(decoder.destinations()).values()
    matrices = {id(one.matrix): one.matrix for one in destinations if isinstance(one, QuantizedRows)}.values()
    assert shape.quantized_bytes == sum(matrix.num_bytes for matrix in matrices)
    experts = [layer.mlp for layer in decoder.layers]
    assert all(isinstance(one.gate_up, QuantizedMatrix) and isinstance(one.down, QuantizedMatrix) for one in experts)
    assert sum(isinstance(layer.mixer.output.weight_OI, QuantizedMatrix) for layer in decoder.layers) == len(
        decoder.layers
    )


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("case", ["qwen3moe", "gpt-oss", "mixtral"])
def test_a_step_through_experts_in_one_call_is_the_step_layer_by_layer(case, write):
    def logits(in_one):
        with Engine.load(str(path), memory="4GiB", threads=2, dtype="bfloat16", chunk_size=40) as engine:
            assert engine.model.lane.steps is not None
            if not in_one:
                engine.model.lane.steps = None
            recorder = LogitRecorder(engine)
            engine.generate_batch([PROMPT, PROMPT[7:20]], max_tokens=6, ignore_eos=True)
            return recorder.all

    path = write(case, **SIZES[case])
    assert torch.equal(logits(in_one=True), logits(in_one=False))
