"""Every reader of files that others made, as one function of the file's bytes, with whole files to break."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from penstock.answer.grammar import GrammarWriter
from penstock.batch.lines import in_order, lines_of, read_line
from penstock.cache.disk import verified
from penstock.cache.folder import SUFFIX, CacheFolder
from penstock.cache.slabs import Slab, checksum, encode_header
from penstock.config import CONFIG_FILE, DEFAULT_MODEL, load_config
from penstock.engine.grammar_proof import GrammarProof
from penstock.engine.planning import plan
from penstock.errors import InvalidModelFile, InvalidPrompt
from penstock.models.adapter import read_adapter
from penstock.models.files import resolve
from penstock.models.safetensors import read_safetensors_header
from penstock.prompt.load import tokenizer_from_folder, tokenizer_from_gguf
from penstock.prompt.render import ChatTemplate
from penstock.prompt.tokens import Tokenizer
from penstock.server.openai.chat_asks import ResponseFormat
from penstock.trace.document import Trace
from penstock.trace.summary import summarize

GOLDEN = Path(__file__).parent / "golden"
NAMESPACE = b"a namespace of16"
TEXT = "Water falls 1,204 metres.\n  Ünïcode\t<s> and more"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": [2, 3],
}
QWEN_EXPERTS = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "sliding_window": 11,
    "head_dim": 16,
}
TEMPLATES = [
    "{% for message in messages %}<|{{ message.role }}|>{{ message['content'] | trim }}{% endfor %}",
    "{%- set ns = namespace(n=0) -%}{%- for m in messages if m.role != 'x' -%}{%- set ns.n = ns.n + loop.index -%}"
    "{{ '%s: %s' | format(m.role, m.content.upper()) }}{{ m.content[:3] ~ ns.n }}{%- endfor -%}",
    "{% macro line(m, end='\n') %}{{ m | tojson(indent=2) }}{{ end }}{% endmacro %}{% if tools is defined %}{% endif %}"
    "{{ messages | map(attribute='content') | join(', ') }}{% for m in messages %}{{ line(m) }}{% endfor %}",
]
SETTINGS = b"""# what a user may set
memory = "2GiB"
chunk-size = "auto"
context = 4096
latency-target-ms = 50.5
priority = "interleaved"
strict = false
device = "cpu"
dtype = "auto"
max-running = 8
"""


def small_gguf(path: Path) -> bytes:
    writer = gguf_package.GGUFWriter(path, "llama")
    numbers = {"block_count": 1, "context_length": 512, "embedding_length": 32, "feed_forward_length": 48}
    for name, number in (numbers | {"attention.head_count": 4, "attention.head_count_kv": 2}).items():
        writer.add_uint32(f"llama.{name}", number)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(f"t{index}" for index in range(30)), "t1t2"])
    writer.add_token_types([1] * 31)
    writer.add_token_merges(["t1 t2"])
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (31, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32)}
    for name, shape in (shapes | {"blk.0.ffn_down": (32, 48)}).items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def gguf_wholes(folder: Path) -> list[bytes]:
    """Cut behind the header but for the bytes of the tensors, so that what is broken is mostly the header."""
    return [small_gguf(folder / "whole.gguf")]


def read_gguf_model(folder: Path) -> Callable[[bytes], object]:
    def read(content: bytes) -> None:
        (folder / "model.gguf").write_bytes(content)
        plan(str(folder / "model.gguf"), prompt_tokens=100, memory="2GiB", device="cpu")
        found = resolve(str(folder / "model.gguf")).gguf
        assert found is not None
        Tokenizer(tokenizer_from_gguf(found.metadata).backend).encode("t1t2 t3", add_special_tokens=True)

    return read


def safetensors_wholes(folder: Path) -> list[bytes]:
    tensors = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
    }
    header = json.dumps(tensors).encode()
    return [header]


def read_safetensors_model(folder: Path) -> Callable[[bytes], object]:
    """Broken are the header's bytes; before them stands their length, which is right but for every eighth."""

    def read(content: bytes) -> None:
        wrong = content[0] ^ content[-1] if content and content[-1] % 8 == 0 else 0
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(content) + wrong) + content + bytes(40))
        read_safetensors_header(folder / "model.safetensors")

    return read


def trained_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    backend.train_from_iterator([TEXT] * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def tokenizer_wholes(folder: Path) -> list[bytes]:
    return [trained_backend().to_str().encode()]


def read_tokenizer(folder: Path) -> Callable[[bytes], object]:
    def read(content: bytes) -> None:
        (folder / "tokenizer.json").write_bytes(content)
        parts = tokenizer_from_folder(folder, {}, {})
        tokenizer = Tokenizer(parts.backend)
        ids = tokenizer.encode(TEXT, add_special_tokens=True)
        tokenizer.decode(ids)
        for _ in tokenizer.stream(iter([TEXT, TEXT]), add_special_tokens=True):
            pass

    return read


def tokenizer_config_wholes(folder: Path) -> list[bytes]:
    declared = {"300": {"content": "<x>", "special": True, "lstrip": False}}
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATES[0]}
    return [json.dumps(settings | {"added_tokens_decoder": declared if folder is None else {}}).encode()]


def read_tokenizer_config(folder: Path) -> Callable[[bytes], object]:
    trained_backend().save(str(folder / "tokenizer.json"))

    def read(content: bytes) -> None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            (folder / name).write_bytes(content)
        tokenizer_from_folder(folder, {}, {})

    return read


def config_wholes(folder: Path) -> list[bytes]:
    return [json.dumps(config).encode() for config in (LLAMA, QWEN_EXPERTS)]


def read_config(folder: Path) -> Callable[[bytes], object]:
    """Plans for it, which claims a lane, reads the shape and prices it."""

    def read(content: bytes) -> None:
        for name in ("config.json", "generation_config.json"):
            (folder / name).write_bytes(content)
        plan(str(folder), prompt_tokens=100, memory="2GiB", device="cpu")

    return read


def settings_wholes(folder: Path) -> list[bytes]:
    return [SETTINGS]


def read_settings(folder: Path) -> Callable[[bytes], object]:
    def read(content: bytes) -> None:
        (folder / CONFIG_FILE).write_bytes(content)
        load_config({}, environment={}, folder=folder)

    return read


def trace_wholes(folder: Path) -> list[bytes]:
    golden = json.loads((GOLDEN / "trace.json").read_text()).values()
    return [json.dumps(_filled(trace) | {"began_at": "2026-01-01T00:00:00+00:00"}).encode() for trace in golden]


def _filled(value: Any) -> Any:
    """Puts numbers where the golden document says that something is measured."""
    if isinstance(value, dict):
        return {name: _filled(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_filled(one) for one in value]
    return {"measured": 1, "int": 2}.get(value, value) if isinstance(value, str) else value


def read_trace(folder: Path) -> Callable[[bytes], object]:
    def read(content: bytes) -> None:
        (folder / "trace.json").write_bytes(content)
        summarize(Trace.read(folder / "trace.json"), num_slowest=5).model_dump_json()

    return read


def template_wholes(folder: Path) -> list[bytes]:
    return [template.encode() for template in TEMPLATES]


def read_template(folder: Path) -> Callable[[bytes], object]:
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer" * 50}]

    def read(content: bytes) -> None:
        (folder / "chat_template.jinja").write_bytes(content)
        source = tokenizer_from_folder(folder, {}, {}).chat_template
        if source is None:
            raise InvalidModelFile("there is no template")
        template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
        template.render(messages)
        template.split(messages, 0)

    trained_backend().save(str(folder / "tokenizer.json"))
    return read


def image_wholes(folder: Path) -> list[bytes]:
    from PIL import Image

    picture = Image.fromarray(np.arange(48 * 40 * 3, dtype=np.uint32).astype(np.uint8).reshape(40, 48, 3))
    wholes = []
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"):
        buffer = io.BytesIO()
        more = {"save_all": True, "append_images": [picture.rotate(90)]} if form in ("GIF", "WEBP") else {}
        picture.save(buffer, format=form, **more)
        wholes.append(buffer.getvalue())
    return wholes


def read_image(folder: Path) -> Callable[[bytes], object]:
    from penstock.foreign.processor import open_image

    return lambda content: open_image(content)


def adapter_header_wholes(folder: Path) -> list[bytes]:
    names = [f"base_model.model.model.layers.{index}.self_attn.{part}_proj" for index in (0, 1) for part in "qv"]
    shapes = [(f"{name}.lora_{part}.weight", shape) for name in names for part, shape in (("A", [2, 4]), ("B", [4, 2]))]
    places = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [32 * index, 32 * index + 32]}
        for index, (name, shape) in enumerate(shapes)
    }
    return [json.dumps(places).encode()]


def adapter_config_wholes(folder: Path) -> list[bytes]:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "base_model_name_or_path": "a/base"}
    patterns = {"rank_pattern": {r"layers\.\d+\.self_attn\.q_proj": 2}, "alpha_pattern": {"v_proj": 3, "(a|b)+": 1.5}}
    return [json.dumps(config | patterns | {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}).encode()]


def _read_whole_adapter(folder: Path) -> None:
    adapter = read_adapter(str(folder))
    for module in adapter.low_rank:
        adapter.rank(module)
        adapter.scale(module)


def read_adapter_header(folder: Path) -> Callable[[bytes], object]:
    (folder / "adapter_config.json").write_bytes(adapter_config_wholes(folder)[0])

    def read(content: bytes) -> None:
        (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content + bytes(256))
        _read_whole_adapter(folder)

    return read


def read_adapter_config(folder: Path) -> Callable[[bytes], object]:
    header = adapter_header_wholes(folder)[0]
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(256))

    def read(content: bytes) -> None:
        (folder / "adapter_config.json").write_bytes(content)
        _read_whole_adapter(folder)

    return read


def slab_wholes(folder: Path) -> list[bytes]:
    """Two slabs as a server stores them, of which the first has recurrent state too."""
    sizes, tokens = (64, 64, 32), tuple(range(16))
    parts = [bytes(range(size)) for size in sizes]
    slab = Slab(key=bytes(16), previous=bytes(16), first=0, tokens=tokens, has_state=True)
    sums = [checksum([memoryview(part)]) for part in parts]
    return [encode_header(slab, NAMESPACE, sizes, sums) + b"".join(parts)]


def read_slab(folder: Path) -> Callable[[bytes], object]:
    """A damaged one is a miss: its file is gone, and nothing is read from it."""
    cache = CacheFolder(folder / "cache")
    path = cache.root / NAMESPACE.hex() / f"{cache.name(bytes(16) + bytes([1]))}{SUFFIX}"
    path.parent.mkdir(parents=True, exist_ok=True)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        if not verified(path, cache):
            raise InvalidModelFile("a miss")

    return read


def batch_wholes(folder: Path) -> list[bytes]:
    chat = {"messages": [{"role": "user", "content": "What is a penstock?"}], "max_tokens": 4, "temperature": 0}
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    texts = [whole, {"prompt": "The water", "stop": ["."]}, {"input": "A text"}, "one message"]
    return [json.dumps(text).encode() for text in texts] + [b"\n".join(json.dumps(text).encode() for text in texts)]


def read_batch_lines(folder: Path) -> Callable[[bytes], object]:
    def read(content: bytes) -> None:
        for line in in_order(lines_of(io.BytesIO(content))):
            _ = read_line(line, {"max_tokens": 4, "temperature": 0}).shared

    return read


def schema_wholes(folder: Path) -> list[bytes]:
    place = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "zip": {"type": "integer"}}}
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]+$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["one", "other", None, 3]},
            "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 3},
            "score": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]},
            "since": {"type": "string", "format": "date"},
        },
        "required": ["name", "places"],
        "additionalProperties": False,
        "$defs": {"place": place},
    }
    return [json.dumps(person).encode(), json.dumps(place | {"required": ["city"]}).encode()]


def read_schema(folder: Path) -> Callable[[bytes], object]:
    """As a server does: read as a field of a request, written as a grammar, compiled where it can be ended."""
    gguf = resolve(DEFAULT_MODEL).gguf
    assert gguf is not None
    backend = tokenizer_from_gguf(gguf.metadata).backend
    given = {"tokenizer": backend.to_str(), "vocab_size": backend.get_vocab_size(), "eos_ids": [2]}
    proof = GrammarProof(lambda: given)

    def read(content: bytes) -> None:
        try:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": json.loads(content)}}
            schema = ResponseFormat.model_validate(form).schema_of_answer
        except (ValueError, RecursionError):
            raise InvalidPrompt("no schema") from None
        assert schema is not None
        proof.require(GrammarWriter({}).json(schema))

    return read


READERS = {
    "GGUF": (gguf_wholes, read_gguf_model),
    "safetensors header": (safetensors_wholes, read_safetensors_model),
    "tokenizer.json": (tokenizer_wholes, read_tokenizer),
    "tokenizer_config.json": (tokenizer_config_wholes, read_tokenizer_config),
    "config.json": (config_wholes, read_config),
    "penstock.toml": (settings_wholes, read_settings),
    "trace": (trace_wholes, read_trace),
    "chat template": (template_wholes, read_template),
    "image": (image_wholes, read_image),
    "adapter header": (adapter_header_wholes, read_adapter_header),
    "adapter config": (adapter_config_wholes, read_adapter_config),
    "slab": (slab_wholes, read_slab),
    "batch line": (batch_wholes, read_batch_lines),
    "schema": (schema_wholes, read_schema),
}
