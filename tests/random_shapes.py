"""Models of any shape on disk, with random weights, written without ever being in memory."""

import json
import struct
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models

from penstock.models.decoder import Decoder
from penstock.models.spec import decoder_spec

SLICE = 16 << 20  # values


def write_random_model(config: dict[str, Any], folder: Path) -> Path:
    """A folder as users have them: config, safetensors in bfloat16, and a tokenizer of one word."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({"w0": 0}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    decoder = Decoder(decoder_spec(config), dtype=torch.bfloat16, device=torch.device("meta"))
    shapes = {name: tuple(tensor.shape) for name, tensor in decoder.destinations()}
    header, end = {}, 0
    for name, shape in shapes.items():
        num_bytes = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (end, end + num_bytes)}
        end += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = torch.empty(SLICE)
    values.uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(0))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for index, (name, shape) in enumerate(shapes.items()):
            left, is_norm = torch.Size(shape).numel(), "norm" in name
            while left:
                count = min(left, SLICE)
                part = values[:count].roll(index + left) if not is_norm else 1 + values[:count]
                file.write(part.bfloat16().view(torch.uint8).numpy())
                left -= count
    return folder
