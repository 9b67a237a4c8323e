"""Adapters that PEFT itself makes and saves, against PEFT's own logits; skipped where it is not installed."""

import pytest
import torch
from image_answers import SETTINGS
from logit_recorder import LogitRecorder
from tiny_models import prompt, save_tiny_model

from penstock import Engine

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.evidence

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
MIXTURE = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CASES = {
    "linear": ("llama", {"target_modules": LINEAR}),
    "patterns": (
        "llama",
        {
            "target_modules": LINEAR,
            "use_rslora": True,
            "rank_pattern": {"layers.1.self_attn.q_proj": 3, "^model.layers.0.mlp.*": 5},
            "alpha_pattern": {"down_proj": 32},
        },
    ),
    "dora": ("llama", {"target_modules": LINEAR, "use_dora": True}),
    "biases": ("qwen2", {"target_modules": ATTENTION, "bias": "all"}),
    "saved": ("qwen2", {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "input_layernorm"]}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
    "gemma3": ("gemma3", {"target_modules": LINEAR}),
    "mixtral": ("mixtral", MIXTURE),
    "qwen3-moe": ("qwen3-moe", MIXTURE),
    "gpt-oss": ("gpt-oss", MIXTURE),
    "qwen3-next": ("qwen3-next", {"target_modules": ["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]}),
}


@pytest.mark.parametrize("lane", ["optimized-native-text", "transformers-generic-text"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_merged_adapter_gives_what_peft_gives(case, lane, tmp_path):
    name, config = CASES[case]
    model = peft.get_peft_model(save_tiny_model(name, tmp_path / "base"), peft.LoraConfig(r=4, lora_alpha=16, **config))
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * (0.2 if "lora_" in path else 0.1))
    model.eval().save_pretrained(tmp_path / "adapter")
    tokens = prompt(40)
    settings = SETTINGS | {"chunk_size": 7, "lane": lane, "adapter": str(tmp_path / "adapter")}
    with Engine.load(str(tmp_path / "base"), **settings) as engine:
        recorder = LogitRecorder(engine)
        answer = engine.generate(tokens, max_tokens=8, temperature=0).token_ids
    expected = model(torch.tensor([[*tokens, *answer[:-1]]]), use_cache=False).logits[0, len(tokens) - 1 :]
    distance = float((recorder.all[-len(answer) :] - expected).abs().max())
    print(f"{case} on {lane}: {distance:.1e}")
    assert distance < 1e-4
    assert list(answer) == expected.argmax(-1).tolist()
