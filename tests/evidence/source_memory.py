"""One row of test_source_table.py: prints the bytes that reading a source adds to the loaded model at its peak."""

from __future__ import annotations

import sys

import torch
import transformers

from penstock.foreign.source_encoder import read_source
from penstock.plan.machine import forget_peak, peak_resident_bytes, resident_bytes

LENGTHS, TILE, WIDTH = (2048, 4096, 8192, 16384), 256, 512


def states(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.get_encoder()(ids, attention_mask=torch.ones_like(ids)).last_hidden_state


def bart_config(num_layers: int, num_positions: int) -> transformers.PretrainedConfig:
    return transformers.BartConfig(
        d_model=WIDTH,
        encoder_layers=num_layers,
        decoder_layers=num_layers,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        max_position_embeddings=num_positions,
    )


def long_model(kind: str) -> transformers.PreTrainedModel:
    """Two layers: the peak of reading does not depend on their number."""
    if kind == "t5":
        config = transformers.T5Config(num_layers=2, num_decoder_layers=1, vocab_size=1000, decoder_start_token_id=0)
    else:
        config = bart_config(2, max(LENGTHS))
    return transformers.AutoModelForSeq2SeqLM.from_config(config).eval()


def main() -> None:
    kind, length, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    model = long_model(kind)
    ids = torch.randint(3, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    read_source(model, ids[:, :64], tile=32)  # what the first use loads is not the source's
    states(model, ids[:, :64])
    forget_peak()
    before = resident_bytes()
    hidden = states(model, ids) if way == "plain" else read_source(model, ids, tile=TILE)
    assert hidden.shape == (1, length, WIDTH)
    print(peak_resident_bytes() - before)


if __name__ == "__main__":
    main()
