"""A tiny random model with a real tokenizer and a chat template that knows tools, as folders have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import transformers

from penstock.config import DEFAULT_MODEL
from penstock.models.files import resolve
from penstock.prompt.load import tokenizer_from_gguf

TEMPLATE = """{%- if tools %}<|im_start|>system
You may call functions:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
To call one, write <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_tiny_chat_model(
    folder: Path,
    template: str = TEMPLATE,
    max_tokens: int = 4096,
    special_tokens: Sequence[str] = (),
    *,
    is_hybrid: bool = False,
) -> None:
    """`special_tokens`: added to those of the tokenizer. `is_hybrid`: the model has recurrent state."""
    backend = tokenizer_from_gguf(resolve(DEFAULT_MODEL).gguf.metadata).backend
    backend.add_special_tokens([*special_tokens])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    kind = partial(transformers.Lfm2Config, layer_types=["conv", "full_attention"], block_multiple_of=32)
    config = (kind if is_hybrid else transformers.LlamaConfig)(
        vocab_size=backend.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_tokens,
        eos_token_id=backend.token_to_id("<|im_end|>"),
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
