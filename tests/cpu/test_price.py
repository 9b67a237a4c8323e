"""The plan and the engine ask for one price: what a model costs on its lane is said once."""

import dataclasses

import pytest
from tiny_generic import MUST_SHOW, TROUBLE, save_causal_model
from tiny_models import save_tiny_model
from tiny_seq2seq import save_tiny_seq2seq
from tiny_vision_models import save_tiny_vision_model

from penstock.config import load_config
from penstock.engine.engine import Engine
from penstock.lanes.table import LANES, settle
from penstock.models.files import resolve

SETTINGS = {"dtype": "float32", "memory": "3GiB", "threads": 1, "max_running": 9}
MODELS = {
    "native text": (lambda folder: save_tiny_model("llama", folder), None),
    "native hybrid": (lambda folder: save_tiny_model("qwen3-next", folder), None),
    "native images": (lambda folder: save_tiny_vision_model("llava", folder), None),
    "generic packed": (lambda folder: save_causal_model(TROUBLE["gpt2"](), folder), None),
    "generic with its own cache": (lambda folder: save_causal_model(MUST_SHOW["mamba2"](), folder), None),
    "generic images": (
        lambda folder: save_tiny_vision_model("llava", folder),
        "transformers-generic-multimodal",
    ),
    "source": (lambda folder: save_tiny_seq2seq("t5", folder), None),
}
# A card keeps the logits of every sequence whose decodes are captured together.
LOGIT_ROWS_ON_A_CARD = {"native text": 9, "native hybrid": 9, "native images": 9, "generic packed": 9}


@pytest.mark.parametrize("name", MODELS)
def test_plan_and_engine_price_a_model_alike(name, tmp_path, own_verdicts):
    save, lane_id = MODELS[name]
    save(tmp_path)
    with Engine.load(str(tmp_path), lane=lane_id, **SETTINGS) as engine:
        loaded, budget_bytes = engine.model.memory, engine.model.budget_bytes
    asked = load_config(SETTINGS | {"lane": lane_id})
    place = settle(resolve(str(tmp_path), weights=False), asked, has_cuda=False)
    place = dataclasses.replace(place, runtime_bytes=loaded.runtime_bytes, budget_bytes=budget_bytes)
    kind, verdict = LANES[place.lane.id], place.kept_verdict()
    planned = kind.price(place, verdict)
    for field in dataclasses.fields(planned):
        if field.name not in ("shape", "num_running_states"):
            assert getattr(planned, field.name) == getattr(loaded, field.name), field.name
    assert planned.shape.kv_bytes_per_token == loaded.shape.kv_bytes_per_token
    assert planned.shape.weight_bytes == pytest.approx(loaded.shape.weight_bytes, rel=0.01)
    on_card = kind.price(dataclasses.replace(place, device="cuda"), verdict)
    assert on_card.num_logit_rows == LOGIT_ROWS_ON_A_CARD.get(name, 1)
