"""Every causal class of the installed transformers: read exactly, read whole or refused, with a reason; never wrong."""

import pytest
from causal_sweep import EXACT, TRACEBACK, WRONG, answers
from sweep_table import PROPERTY
from tiny_causal import CAUSAL_TYPES

pytestmark = pytest.mark.evidence

# Whatever else changes, these are read in chunks by both calls: what people run, and one of each unusual kind.
_NAMES = """
    afmoe apertus arcee aria_text axk1 axk2 bamba bart bert bloom camembert codegen cohere cohere2 deepseek_v2
    deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone4 falcon falcon_h1 gemma gemma2 gemma3_text
    gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe gpt2 gpt_neo gpt_neox gpt_oss gptj granite
    granitemoe granitemoehybrid helium hunyuan_v1_dense hunyuan_v1_moe hy_v4 jetmoe kimi_linear lfm2 lfm2_moe
    llama llama4_text longcat_flash mamba2 ministral mistral mixtral mpt nemotron olmo olmo2 olmo3 olmoe opt phi
    phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_text qwen3_moe qwen3_next roberta rwkv seed_oss smollm3 stablelm
    starcoder2 xglm
"""
MUST_BE_EXACT = frozenset(_NAMES.split())


@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
def test_a_causal_class_is_answered_truly(model_type, record_property):
    found = answers(model_type)
    for call, answer in found.items():
        record_property(PROPERTY, [call, model_type, answer.kind, answer.reason])
    for call, answer in found.items():
        assert answer.kind not in (TRACEBACK, WRONG), f"{call}: {answer.reason}"
        assert answer.reason, call
        assert answer.kind == EXACT or model_type not in MUST_BE_EXACT, f"{call}: {answer.kind}: {answer.reason}"


def test_the_classes_that_must_be_exact_are_among_them():
    assert set(CAUSAL_TYPES) >= MUST_BE_EXACT
