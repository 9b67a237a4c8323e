"""The lane `transformers-generic-seq2seq-source`: encoder-decoder models, and what one costs. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.lanes.generic_text_kind import generic_obstacle
from penstock.lanes.lane import Claim, LaneFacts, LaneKind
from penstock.lanes.place import Place
from penstock.models.seq2seq_spec import seq2seq_shape, seq2seq_spec
from penstock.plan.memory import MemoryModel
from penstock.proof.verdict import Verdict


def claim(config: Mapping[str, Any]) -> Claim:
    model_type = config.get("model_type")
    if not config.get("is_encoder_decoder"):
        return Claim(eligible=False, reason=f"{model_type} is no encoder-decoder model")
    obstacle = generic_obstacle(config)
    return Claim(eligible=obstacle is None, reason=obstacle or f"{model_type} is an encoder-decoder model")


def price(place: Place, verdict: Verdict | None = None) -> MemoryModel:
    return place.memory(seq2seq_shape(seq2seq_spec(place.files.config), place.item_bytes))


SEQ2SEQ = LaneKind(
    facts=LaneFacts(
        id="transformers-generic-seq2seq-source",
        reads_source=True,
        chunk_boundary="any row of any layer",
        chunk_mask_mode="bidirectional",
    ),
    claim=claim,
    price=price,
    loader="penstock.lanes.seq2seq:Seq2SeqLoader",
    is_checked=True,
    is_own_kind=True,
)
