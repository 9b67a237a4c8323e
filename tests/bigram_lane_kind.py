"""A lane for tables of which token follows which, as docs/development/adding-a-lane.md says: its kind."""

from penstock.lanes.lane import Claim, LaneFacts, LaneKind
from penstock.lanes.place import Place
from penstock.plan.memory import MemoryModel, ModelShape


def claim(config: dict) -> Claim:
    is_bigram = config.get("model_type") == "bigram"
    return Claim(eligible=is_bigram, reason="a table of pairs" if is_bigram else "it is no table of pairs")


def price(place: Place, verdict: object = None) -> MemoryModel:
    vocab_size = place.files.config["vocab_size"]
    shape = ModelShape(
        num_layers=1,
        hidden_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=1,
        intermediate_size=1,
        vocab_size=vocab_size,
        num_parameters=vocab_size**2,
        largest_matrix=0,
        dtype_bytes=place.item_bytes,
        max_context=place.files.config["max_position_embeddings"],
    )
    return place.memory(shape)


BIGRAM = LaneKind(
    facts=LaneFacts(id="test-bigram"),
    claim=claim,
    price=price,
    loader="bigram_lane:BigramLoader",
    needs_transformers=False,
)
