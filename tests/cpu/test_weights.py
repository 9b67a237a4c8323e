"""Weights come back with Hugging Face's names and values, in bounded memory, from safetensors and GGUF."""

from __future__ import annotations

import json
import math
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Quant
from logit_recorder import LogitRecorder
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS as TINY
from tiny_models import prompt, put_experts_in_mxfp4, reference_logits, save_tiny_model
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint

from penstock.engine.engine import Engine
from penstock.errors import InvalidModelFile, PenstockError, UnsupportedModel
from penstock.foreign.pretrained import causal_class, load_causal
from penstock.models import gguf as gguf_header
from penstock.models import weights
from penstock.models.decoder import Decoder
from penstock.models.files import gguf_dtype, resolve
from penstock.models.gguf import read_gguf
from penstock.models.gguf_config import hf_config
from penstock.models.spec import decoder_spec
from penstock.models.weights import GgufWeights, SafetensorsWeights, open_weights

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}


@pytest.fixture
def small_slices(monkeypatch):
    """Slices so small that every tensor here takes several."""
    monkeypatch.setattr(weights, "SLICE_BYTES", 1024)


OTHER_FIRST_NAMES = {"nemotron_h": "backbone."}  # which the loader knows by what is stored
WITHOUT_BIASES = {
    "nemotron_h": "mlp_bias",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "attention_bias"),
}


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("family", sorted({config().model_type: name for name, config in TINY.items()}.items()))
def test_a_decoder_asks_for_the_tensors_that_the_published_class_saves(tmp_path, family, has_biases):
    config = TINY[family[1]]()
    config.attention_bias = config.mlp_bias = has_biases
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored_config = json.loads((tmp_path / "config.json").read_text())
    if has_biases and family[0] in WITHOUT_BIASES:
        with pytest.raises(UnsupportedModel, match=f"no native form with {WITHOUT_BIASES[family[0]]} = True"):
            decoder_spec(stored_config)
        return
    spec = decoder_spec(stored_config)
    decoder = Decoder(spec, dtype=torch.float32, device=torch.device("meta"))
    stored = SafetensorsWeights(sorted(tmp_path.glob("*.safetensors"))).names
    first = OTHER_FIRST_NAMES.get(family[0], "model.")
    assert {re.sub(r"^model\.", first, name) for name, _ in decoder.destinations()} == stored


# --- safetensors --------------------------------------------------------------------------------------------


def folder_of(path: Path, shards: dict[str, dict[str, torch.Tensor]], with_index=False):
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    if with_index:
        weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return open_weights(resolve(str(path)))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("small_slices")
def test_values_arrive_in_any_float_type(tmp_path, stored, wanted):
    shapes = [(50, 17), (1000,), (3, 5, 40), (2, 2000), ()]
    tensors = {f"t{index}": torch.randn(shape).to(stored) for index, shape in enumerate(shapes)}
    source = folder_of(tmp_path, {"model.safetensors": tensors})
    assert source.names == set(tensors)
    for name, tensor in tensors.items():
        destination = torch.full(tensor.shape, torch.nan, dtype=wanted)
        source.copy_into(destination, name)
        assert torch.equal(destination, tensor.to(wanted))
        assert source.shape(name) == tuple(tensor.shape)


def test_rows_of_a_fused_parameter_and_strided_views_are_filled(tmp_path, small_slices):
    tensor = torch.randn(30, 20)
    source = folder_of(tmp_path, {"model.safetensors": {"w": tensor}})
    fused = torch.nn.Parameter(torch.zeros(90, 20))
    source.copy_into(fused[30:60], "w")
    assert torch.equal(fused[30:60], tensor)
    assert not fused[:30].any()
    assert not fused[60:].any()
    columns = torch.zeros(30, 40)
    source.copy_into(columns[:, ::2], "w")
    assert torch.equal(columns[:, ::2], tensor)


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_are_one_source(tmp_path, with_index):
    shards = {f"model-0000{part}-of-00002.safetensors": {f"w{part}": torch.randn(3, 4)} for part in (1, 2)}
    source = folder_of(tmp_path, shards, with_index)
    for tensors in shards.values():
        for name, tensor in tensors.items():
            destination = torch.empty_like(tensor)
            source.copy_into(destination, name)
            assert torch.equal(destination, tensor)


def test_most_values_decide_the_stored_type(tmp_path):
    for index, (dtype, name) in enumerate([(torch.float32, "F32"), (torch.bfloat16, "BF16"), (torch.float16, "F16")]):
        path = tmp_path / str(index)
        path.mkdir()
        tensors = {
            "w": torch.zeros(64, 64, dtype=dtype),
            "norm": torch.zeros(64),
            "mask": torch.zeros(9, dtype=torch.bool),
        }
        source = folder_of(path, {"model.safetensors": tensors})
        assert source.quantization == name


def test_what_cannot_be_given_is_refused_by_name(tmp_path):
    source = folder_of(
        tmp_path, {"model.safetensors": {"w": torch.zeros(2, 3), "ints": torch.zeros(4, dtype=torch.int64)}}
    )
    with pytest.raises(InvalidModelFile, match="no tensor 'v'"):
        source.copy_into(torch.zeros(2, 3), "v")
    with pytest.raises(InvalidModelFile, match=r"\(2, 3\).*\(3, 2\)"):
        source.copy_into(torch.zeros(3, 2), "w")
    with pytest.raises(UnsupportedModel, match="stored as I64"):
        source.copy_into(torch.zeros(4), "ints")


def test_a_table_of_embeddings_of_drafting_layers_is_left_aside(tmp_path):
    """As GLM-4.5 and DeepSeek V3 are published, with a layer more than their config counts."""
    model = save_tiny_model("glm4-moe", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    stored |= {f"model.layers.4.{name}.weight": torch.zeros(199, 64) for name in ("embed_tokens", "shared_head.head")}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Engine.load(str(tmp_path), dtype="float32", threads=1, memory="4GiB", prefix_cache=False) as engine:
        recorder = LogitRecorder(engine)
        engine.generate(tokens := prompt(20), max_tokens=1, ignore_eos=True)
    assert float((recorder.all[-1] - reference_logits(model, tokens)[-1]).abs().max()) < 1e-4


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    with pytest.raises(InvalidModelFile, match="'w' is in both"):
        folder_of(tmp_path, {f"{part}.safetensors": {"w": torch.zeros(2)} for part in "ab"})


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path):
    source = folder_of(tmp_path, {"model.safetensors": {"w": torch.zeros(100)}})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InvalidModelFile, match="ends at byte"):
        source.copy_into(torch.zeros(100), "w")
    path.unlink()
    with pytest.raises(InvalidModelFile, match="No such file"):
        source.copy_into(torch.zeros(100), "w")


def raw_safetensors(header: object, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape=(2,), dtype="F32", offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "header of 0 bytes exceeds"),
        (b"\1\0", "exceeds"),
        (raw_safetensors({}, length=1 << 60), "exceeds"),
        (raw_safetensors(b"{nonsense"), "not JSON"),
        (raw_safetensors(b"[" * 100_000), "not JSON"),
        (raw_safetensors([1]), "not a JSON object"),
        (raw_safetensors({"w": 3}), "lacks"),
        (raw_safetensors({"w": entry((-1,))}, bytes(8)), "lacks"),
        (raw_safetensors({"w": entry((True,))}, bytes(8)), "lacks"),
        (raw_safetensors({"w": entry(offsets=(0, 8, 9))}, bytes(8)), "lacks"),
        (raw_safetensors({"w": entry(offsets=(0, 9))}, bytes(8)), "0 to 9 of 8"),
        (raw_safetensors({"w": entry(offsets=(8, 0))}, bytes(8)), "8 to 0 of 8"),
        (raw_safetensors({"w": entry((3,))}, bytes(8)), "has 8 bytes"),
        (raw_safetensors({"w": entry((1 << 62, 1 << 62))}, bytes(8)), "has 8 bytes"),
        (raw_safetensors({"v": entry(), "w": entry((2,), "F32", (4, 12))}, bytes(12)), "overlaps"),
    ],
)
def test_a_malformed_header_is_refused_in_a_sentence(tmp_path, content, complaint):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(InvalidModelFile, match=complaint) as caught:
        SafetensorsWeights([path])
    assert str(caught.value).endswith("download it again.")


def test_changed_bytes_raise_only_our_errors(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({f"w{index}": torch.zeros(4, 4) for index in range(5)}, path)
    whole = path.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", whole[:8])[0]
    choice = random.Random(3)
    complaints = []
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(choice.choice((1, 1, 3))):
            changed[choice.randrange(header_bytes)] = choice.randrange(256)
        path.write_bytes(changed[: choice.choice((len(whole), choice.randrange(len(whole))))])
        try:
            source = SafetensorsWeights([path])
            for name in source.names:
                source.copy_into(torch.zeros(4, 4), name)
        except PenstockError as error:
            complaints.append(str(error))
    assert len(complaints) > 100
    assert not any("\n" in complaint for complaint in complaints)


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path, small_slices):
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (3, 12, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 12, 2), generator=generator, dtype=torch.uint8)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "w.safetensors")
    rows = torch.empty(3, 12, 64)
    SafetensorsWeights([tmp_path / "w.safetensors"]).copy_into(rows.transpose(1, 2), "w")
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(rows.transpose(1, 2), expected)
    with pytest.raises(InvalidModelFile, match="config asks for scales"):
        SafetensorsWeights([tmp_path / "w.safetensors"]).copy_into(torch.empty(3, 12, 96).transpose(1, 2), "w")


def test_a_checkpoint_with_experts_in_mxfp4_runs_natively_as_transformers_runs_it(tmp_path):
    save_tiny_model("gpt-oss", tmp_path)
    put_experts_in_mxfp4(tmp_path)
    dequantized = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=transformers.Mxfp4Config(dequantize=True), attn_implementation="eager"
    ).float()  # which bfloat16 holds exactly
    tokens = prompt(50)
    with Engine.load(str(tmp_path), dtype="float32", memory="4GiB", threads=1, chunk_size=7) as engine:
        assert engine.lane.id == "optimized-native-text"
        recorder = LogitRecorder(engine)
        output = engine.generate(tokens, max_tokens=32, ignore_eos=True)
    expected = reference_logits(dequantized, [*tokens, *output.token_ids][:-1])[len(tokens) - 1 :]
    assert (recorder.all - expected).abs().max() <= 1e-4
    assert output.token_ids == tuple(expected.argmax(-1).tolist())


# --- GGUF: quantised types ----------------------------------------------------------------------------------


def one_tensor_gguf(path: Path, quant: Quant, blocks: np.ndarray, name="blk.0.ffn_up.weight"):
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_tensor(name, blocks, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufWeights(read_gguf(path))


def blocks_of(quant: Quant, rows: int, columns: int) -> np.ndarray:
    """Quantised values where the library can make them, else random blocks whose scales are finite."""
    generator = np.random.default_rng(7)
    try:
        return gguf_package.quants.quantize(generator.standard_normal((rows, columns)).astype(np.float32), quant)
    except NotImplementedError:
        block_items, block_bytes = gguf_package.GGML_QUANT_SIZES[quant]
        return generator.integers(0, 64, (rows, columns // block_items * block_bytes), dtype=np.uint8)


@pytest.mark.parametrize(
    "quant",
    [
        Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1,
        Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K, Quant.IQ4_NL, Quant.IQ4_XS,
    ],
    ids=lambda quant: quant.name,
)  # fmt: skip
@pytest.mark.usefixtures("small_slices")
def test_every_quantised_type_equals_the_reference(tmp_path, quant):
    blocks = blocks_of(quant, 37, 512)
    expected = torch.from_numpy(np.array(gguf_package.quants.dequantize(blocks, quant)))
    source = one_tensor_gguf(tmp_path / "one.gguf", quant, blocks)
    name = "model.layers.0.mlp.up_proj.weight"
    assert expected.isfinite().all()
    assert source.shape(name) == (37, 512)
    assert source.quantization == quant.name
    assert gguf_dtype(read_gguf(tmp_path / "one.gguf")) == ("float32" if quant == Quant.F32 else "bfloat16")
    for dtype in (torch.float32, torch.bfloat16):
        destination = torch.full((37, 512), torch.nan, dtype=dtype)
        source.copy_into(destination, name)
        assert torch.equal(destination, expected.to(dtype))


def test_types_without_a_meaning_as_weights_are_refused(tmp_path):
    source = one_tensor_gguf(tmp_path / "one.gguf", Quant.I32, np.zeros((2, 4), np.int32))
    with pytest.raises(UnsupportedModel, match="stored as I32"):
        source.copy_into(torch.zeros(2, 4), "model.layers.0.mlp.up_proj.weight")


# --- GGUF: whole models -------------------------------------------------------------------------------------


def interleave_rotary_rows(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to the q and k of its llama family."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def write_gguf(model: Any, architecture: str, path: Path, quant=Quant.F32, **metadata) -> Path:
    """Converts a transformers model by the `gguf` package's own table of names."""
    config = model.config
    arch = next(key for key, name in gguf_package.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf_package.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf_package.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_name("tiny")
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in metadata.items():
        adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add: Any = adders[type(value)]
        add(f"{architecture}.{key.replace('__', '.')}", value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for hf_name, values in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, suffix = hf_name.rsplit(".", 1)
        if architecture in ("llama", "smollm3") and stem.split(".")[-1] in heads:
            values = interleave_rotary_rows(values, heads[stem.split(".")[-1]])
        if architecture == "gemma3" and stem.endswith("norm"):
            values = values + 1
        stored = Quant.F32 if values.dim() == 1 else quant
        blocks = gguf_package.quants.quantize(values.float().contiguous().numpy(), stored)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", blocks, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_model(model_type: str, **settings) -> Any:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | settings))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)  # norms and biases too, so that nothing passes by being 0 or 1
    return model


def filled_from(path: Path) -> Any:
    """A transformers model made of nothing but our config and our tensors."""
    config = hf_config(read_gguf(path))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    ).eval()
    source = GgufWeights(read_gguf(path))
    wanted = {name for name in model.state_dict() if name != "lm_head.weight" or not config["tie_word_embeddings"]}
    assert source.names == wanted
    for name in wanted:
        source.copy_into(model.get_parameter(name), name)
    model.tie_weights()
    return model


FAMILIES = {
    "llama": ("llama", {"tie_word_embeddings": True, "rope_theta": 5000.0}, {"rope__freq_base": 5000.0}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama with wide heads": ("llama", {"head_dim": 16}, {"rope__dimension_count": 16}),
    "llama, linear": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    ),
    "qwen2": ("qwen2", {}, {}),
    "qwen2, yarn": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 64,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None}, {}),
    "phi3": (
        "phi3",
        {"sliding_window": 5, "eos_token_id": None, "bos_token_id": None},
        {"attention__sliding_window": 5},
    ),
    "phi3, partly rotary": (
        "phi3",
        {"partial_rotary_factor": 0.75, "sliding_window": None, "eos_token_id": None, "bos_token_id": None},
        {"rope__dimension_count": 6, "attention__sliding_window": 0},
    ),
    "mistral": ("mistral", {"sliding_window": 5}, {"attention__sliding_window": 5}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 5, "eos_token_id": None, "rope_theta": 5000.0},
        {
            "rope__freq_base": 5000.0,
            "attention__sliding_window": 5,
            "attention__sliding_window_pattern": [True, True, True, False, True, True, True],
        },
    ),
    "olmo2": ("olmo2", {"eos_token_id": None}, {}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 5,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "final_logit_softcapping": 30.0,
        },
        {
            "attention__sliding_window": 5,
            "rope__freq_base": 1e6,
            "rope__scaling__type": "linear",
            "rope__scaling__factor": 8.0,
            "final_logit_softcapping": 30.0,
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("small_slices")
def test_a_converted_model_comes_back_equal(tmp_path, family):
    model_type, settings, metadata = FAMILIES[family]
    original = random_model(model_type, **settings)
    architecture = {"gemma3_text": "gemma3", "mistral": "llama", "olmo3": "olmo2"}.get(model_type, model_type)
    if "rope__freq_base" not in metadata:
        metadata = metadata | {"rope__freq_base": float(theta_of(original.config))}
    path = write_gguf(original, architecture, tmp_path / "model.gguf", **metadata)
    ours = filled_from(path)
    for (name, expected), found in zip(original.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-7 if "norm" in name else 0, msg=name)
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, original(tokens).logits, rtol=1e-4, atol=1e-4)


def theta_of(config) -> float:
    return config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_transformers_reads_the_same_values_from_the_same_file(tmp_path, architecture):
    original = random_model(architecture, hidden_size=64, intermediate_size=96)
    metadata = {"rope__freq_base": 10000.0, "rope__dimension_count": 16}
    path = write_gguf(original, architecture, tmp_path / "model.gguf", quant=Quant.Q8_0, **metadata)
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=original)["tensors"]
    source = GgufWeights(read_gguf(path))
    assert source.quantization == "Q8_0"
    assert set(theirs) == source.names
    for name, expected in theirs.items():
        found = torch.empty_like(expected)
        source.copy_into(found, name)
        assert torch.equal(found, expected), name


def test_llama3_factors_are_those_that_transformers_computes(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain = random_model("llama", head_dim=32).model.rotary_emb.inv_freq
    scaled = random_model("llama", head_dim=32, rope_scaling=scaling).model.rotary_emb.inv_freq
    factors = (plain / scaled).numpy()
    writer = gguf_package.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(32, np.float32))
    writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = hf_config(read_gguf(tmp_path / "model.gguf"))["rope_scaling"]
    assert found["rope_type"] == "factors"
    torch.testing.assert_close(plain / torch.tensor(found["factors"]), scaled)


def test_longrope_comes_back_as_phi3_wants_it(tmp_path):
    scaling = {"type": "longrope", "long_factor": [2.0, 3.0, 5.0, 7.0], "short_factor": [1.0, 1.0, 1.5, 2.0]}
    settings = {"rope_scaling": scaling, "original_max_position_embeddings": 64, "sliding_window": None}
    original = random_model("phi3", eos_token_id=None, bos_token_id=None, **settings)
    for kind in ("long", "short"):
        holder = torch.nn.Module()
        holder.register_buffer("weight", torch.tensor(scaling[f"{kind}_factor"]))
        original.add_module(f"rope_factors_{kind}", holder)
    metadata = {"rope__freq_base": 10000.0, "rope__scaling__original_context_length": 64}
    attention_factor = math.sqrt(1 + math.log(256 / 64) / math.log(64))
    path = write_gguf(
        original, "phi3", tmp_path / "model.gguf", rope__scaling__attn_factor=attention_factor, **metadata
    )
    config = hf_config(read_gguf(path))
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": scaling["long_factor"],
        "short_factor": scaling["short_factor"],
        "original_max_position_embeddings": 64,
    }
    ours = filled_from(path)
    for length in (40, 100):
        tokens = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            torch.testing.assert_close(ours(tokens).logits, original(tokens).logits, rtol=1e-4, atol=1e-4)


# --- the default model --------------------------------------------------------------------------------------


def test_the_default_models_rotary_rows_are_put_back_as_transformers_does():
    files = resolve("smollm2")
    source = open_weights(files)
    assert (source.quantization, files.config["dtype"]) == ("Q4_1", "bfloat16")
    assert files.gguf is not None
    stored = files.gguf.tensors
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    for gguf_name, name in {"blk.7.attn_q.weight": "q_proj", "blk.7.attn_k.weight": "k_proj"}.items():
        tensor = stored[gguf_name]
        raw = np.fromfile(files.gguf.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        values = gguf_package.quants.dequantize(raw.reshape(tensor.shape[0], -1), tensor.quant_type)
        expected = LlamaTensorProcessor(heads).process(values, gguf_name).weights
        found = torch.empty(tensor.shape)
        source.copy_into(found, f"model.layers.7.self_attn.{name}.weight")
        assert np.array_equal(found.numpy(), expected)
        assert not np.array_equal(found.numpy(), values)


LOAD = """
import sys, torch
from penstock.models.decoder import Decoder
from penstock.models.files import gguf_dtype, resolve
from penstock.models.weights import open_weights
source = open_weights(resolve("smollm2"))
destinations = {name: torch.zeros(source.shape(name), dtype=torch.bfloat16).add_(1) for name in source.names}
if sys.argv[1] == "load":
    for name, destination in destinations.items():
        source.copy_into(destination, name)
assert ".gguf" not in open("/proc/self/maps").read()
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_loading_the_default_model_takes_little_more_than_its_parameters():
    def peak_kib(mode):
        return int(
            subprocess.run([sys.executable, "-c", LOAD, mode], capture_output=True, text=True, check=True).stdout
        )

    assert peak_kib("load") - peak_kib("baseline") < 60 * 1024


def test_the_header_of_a_gguf_is_read_once_for_a_load(monkeypatch):
    read = []
    preamble = gguf_header._read_preamble
    monkeypatch.setattr(gguf_header, "_read_preamble", lambda cursor: read.append(cursor.path) or preamble(cursor))
    with Engine.load("smollm2", memory="2GiB", threads=1):
        assert len(read) == 1


def test_weights_that_transformers_maps_get_memory_of_their_own(tmp_path):
    """A mapped weight reads zeros, or ends the process, when its file is cut short."""
    reference = save_tiny_model("llama", tmp_path)
    files = resolve(str(tmp_path))
    model_class, config = causal_class(files)
    model = load_causal(files, model_class, config, torch.float32, torch.device("cpu"))
    for path in files.weight_files:
        path.write_bytes(b"")
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True)
    )
