"""Adapters: what a model with one merged at load answers, which model that is to caches, and what is refused."""

import json
import shutil

import pytest
import torch
from adapters import ALPHA, RANK, low_rank, merged, modules_named, save_adapter
from image_answers import SETTINGS
from logit_recorder import LogitRecorder
from safetensors.torch import load_file, save_file
from tiny_models import prompt, reference_logits
from transformers import PreTrainedModel

from penstock import Engine
from penstock.errors import InvalidModelFile, ModelNotFound, PenstockError, UnsupportedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
NATIVE, GENERIC = "optimized-native-text", "transformers-generic-text"
SCALE = {"": ALPHA / RANK}


def holds(engine: Engine, truth: PreTrainedModel) -> None:
    """The prompt in chunks and what was written after it, against the merged model of transformers."""
    recorder = LogitRecorder(engine)
    tokens = prompt(30)
    answer = engine.generate(tokens, max_tokens=6, temperature=0).token_ids
    expected = reference_logits(truth, [*tokens, *answer[:-1]])[len(tokens) - 1 :]
    torch.testing.assert_close(recorder.all[-len(answer) :], expected, atol=1e-4, rtol=0)
    assert list(answer) == expected.argmax(-1).tolist()


@pytest.fixture
def adapted(tiny, tmp_path, own_verdicts):
    engines: list[Engine] = []

    def make(
        name: str, tensors: dict[str, torch.Tensor], *, lane: str | None = None, settings=None, **config
    ) -> Engine:
        adapter = save_adapter(tmp_path / "adapter", tensors, **config)
        given = SETTINGS | {"chunk_size": 7, "lane": lane, "adapter": str(adapter)} | (settings or {})
        engines.append(Engine.load(str(tiny(name)[0]), **given))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("lane", [NATIVE, GENERIC])
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_merged_adapter_gives_what_transformers_gives_with_it(adapted, tiny, name, lane):
    model = tiny(name)[1]
    tensors = low_rank(model, modules_named(model, *ATTENTION, *MLP, "qkv_proj", "gate_up_proj"))
    holds(adapted(name, tensors, lane=lane), merged(model, tensors, SCALE))


def test_ranks_and_alphas_by_module_are_followed(adapted, tiny):
    model = tiny("llama")[1]
    usual = low_rank(model, modules_named(model, "q_proj", "down_proj"))
    wide = low_rank(model, modules_named(model, "layers.1.mlp.up_proj"), rank=5)
    engine = adapted(
        "llama", usual | wide, use_rslora=True, rank_pattern={"layers.1.mlp.up_proj": 5}, alpha_pattern={"down_proj": 2}
    )
    holds(engine, merged(model, usual | wide, {"down_proj": 2 / 3**0.5, "up_proj": 12 / 5**0.5, "": 12 / 3**0.5}))


def test_directions_and_lengths_are_merged_apart(adapted, tiny):
    model = tiny("llama")[1]
    tensors = low_rank(model, modules_named(model, *ATTENTION))
    for path in modules_named(model, *ATTENTION):
        tensors[f"{path}.lora_magnitude_vector"] = model.get_submodule(path).weight.detach().norm(dim=1) * 1.3
    holds(adapted("llama", tensors, use_dora=True), merged(model, tensors, SCALE))


def test_modules_that_were_saved_whole_take_the_place_of_the_models_own(adapted, tiny):
    model = tiny("qwen2")[1]
    own = dict(model.named_parameters())
    names = ["lm_head.weight", "model.norm.weight", "model.layers.2.self_attn.k_proj.bias"]
    tensors = low_rank(model, modules_named(model, "q_proj")) | {name: own[name].detach() * 1.5 for name in names}
    holds(adapted("qwen2", tensors, modules_to_save=["lm_head", "norm"], bias="all"), merged(model, tensors, SCALE))


@pytest.mark.parametrize(("name", "lane"), [("mixtral", NATIVE), ("mixtral", GENERIC), ("gpt-oss", NATIVE)])
def test_experts_are_changed_where_they_lie_in_one_parameter(adapted, tiny, name, lane):
    model = tiny(name)[1]
    tensors, truth = _for_all_experts(model)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    holds(adapted(name, tensors, lane=lane, target_parameters=targets), truth)


@torch.no_grad()
def _for_all_experts(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], PreTrainedModel]:
    truth, tensors = merged(model, {}, {}), {}
    for path in modules_named(truth, "mlp.experts"):
        mixture = truth.get_submodule(path)
        for kind, wrapped in (("gate_up_proj", f"{path}.base_layer"), ("down_proj", path)):
            weights = getattr(mixture, kind)
            matrices = weights.mT if getattr(mixture, "is_transposed", False) else weights
            count, outputs, inputs = matrices.shape
            a, b = torch.randn(count * RANK, inputs) * 0.2, torch.randn(outputs, RANK * count) * 0.2
            tensors |= {f"{wrapped}.lora_A.weight": a, f"{wrapped}.lora_B.weight": b}
            for expert in range(count):
                rows, columns = slice(expert * RANK, (expert + 1) * RANK), slice(expert, None, count)
                matrices[expert] += ALPHA / RANK * b[:, columns] @ a[rows]
    return tensors, truth


@torch.no_grad()
@pytest.mark.parametrize("lane", [NATIVE, GENERIC])
def test_experts_are_changed_one_by_one_as_older_adapters_do(adapted, tiny, lane):
    model, tensors = tiny("mixtral")[1], {}
    truth = merged(model, {}, {})
    for path in modules_named(truth, "mlp.experts"):
        mixture, old = truth.get_submodule(path), path.replace("mlp", "block_sparse_moe")
        gate, up = mixture.gate_up_proj[2].chunk(2)
        for kind, matrix in (("w1", gate), ("w3", up), ("w2", mixture.down_proj[2])):
            a, b = torch.randn(RANK, matrix.shape[1]) * 0.2, torch.randn(matrix.shape[0], RANK) * 0.2
            tensors |= {f"{old}.2.{kind}.lora_A.weight": a, f"{old}.2.{kind}.lora_B.weight": b}
            matrix += ALPHA / RANK * b @ a
    holds(adapted("mixtral", tensors, lane=lane), truth)


def test_packed_matrices_are_those_of_the_merged_model(adapted, tiny, tmp_path):
    folder, model = tiny("llama")
    tensors = low_rank(model, modules_named(model, *ATTENTION, *MLP))
    merged(model, tensors, SCALE).save_pretrained(tmp_path / "merged")
    shutil.copy(folder / "tokenizer.json", tmp_path / "merged")
    ours = adapted("llama", tensors, settings={"quantize": "int8"})
    assert any("packed again" in said for said in ours.adjustments)
    with Engine.load(str(tmp_path / "merged"), **SETTINGS, quantize="int8", chunk_size=7) as theirs:
        seen, expected = LogitRecorder(ours), LogitRecorder(theirs)
        for engine in (ours, theirs):
            engine.generate(prompt(30), max_tokens=1)
    torch.testing.assert_close(seen.all, expected.all, atol=2e-2, rtol=0)  # a code may round the other way


def test_an_adapter_makes_another_model_to_caches_and_is_named(adapted, tiny, load):
    model = tiny("llama")[1]
    tensors = low_rank(model, modules_named(model, "q_proj"))
    first, again = (adapted("llama", tensors).model for _ in range(2))
    other = adapted("llama", {name: value * 2 for name, value in tensors.items()}).model
    scaled = adapted("llama", tensors, lora_alpha=1).model
    plain = load("llama").model
    assert first.identity == again.identity
    assert len({one.identity for one in (first, other, scaled, plain)}) == 4
    assert (first.adapter, plain.adapter) == ("adapter", None)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(3, 65)}, InvalidModelFile, "does not fit"),
        ({"model.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(64, 2)}, InvalidModelFile, "does not fit"),
        ({"model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(3, 64)}, InvalidModelFile, "no lora_B"),
        ({"model.layers.0.self_attn.z_proj.weight": torch.ones(3, 64)}, InvalidModelFile, "Load that model"),
        ({"lm_head.lora_embedding_G": torch.ones(3, 64)}, UnsupportedModel, "not merged here"),
        ({"peft_type": "IA3"}, UnsupportedModel, "only LORA"),
        ({"init_lora_weights": "pissa"}, UnsupportedModel, "changed the base model"),
        ({"layer_replication": [[0, 2]]}, UnsupportedModel, "layer_replication"),
        ({"alpha_pattern": {"(": 2}}, InvalidModelFile, "alpha_pattern"),
        ({"r": 5}, InvalidModelFile, "of 5 each"),
        ({"use_dora": True}, InvalidModelFile, "no lora_magnitude_vector"),
    ],
)
def test_what_does_not_fit_is_refused(adapted, tiny, changes, error, said):
    model = tiny("llama")[1]
    tensors = low_rank(model, modules_named(model, "q_proj"))
    tensors |= {name: value for name, value in changes.items() if isinstance(value, torch.Tensor)}
    config = {name: value for name, value in changes.items() if name not in tensors}
    with pytest.raises(error, match=said):
        adapted("llama", tensors, **config)


def test_tied_embeddings_are_not_changed(adapted, tiny):
    model = tiny("llama-mha-tied-bias")[1]
    tensors = low_rank(model, ["model.embed_tokens"])
    with pytest.raises(UnsupportedModel, match="embeddings and head alike"):
        adapted("llama-mha-tied-bias", tensors)


def test_weights_that_a_lane_does_not_read_are_not_left_out_silently(tiny, tmp_path):
    folder, _ = tiny("llama")
    shutil.copytree(folder, tmp_path / "base")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": torch.ones(4, 4)}, tmp_path / "base" / "model.safetensors")
    adapter = save_adapter(tmp_path / "adapter", {"mtp.fc.weight": torch.ones(4, 4)})
    with pytest.raises(UnsupportedModel, match="does not read"):
        Engine.load(str(tmp_path / "base"), adapter=str(adapter), **SETTINGS)


def test_a_folder_without_safetensors_is_refused(tiny, tmp_path):
    with pytest.raises(ModelNotFound, match="is no adapter"):
        Engine.load(str(tiny("llama")[0]), adapter=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(PenstockError, match="a pickle, which is never read"):
        Engine.load(str(tiny("llama")[0]), adapter=str(tmp_path))
