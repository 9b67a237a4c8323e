"""A transformers model's own `generate`, attached: the same logits, read in chunks; or a refusal with the reason."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tiny_generic import TROUBLE, causal_model
from tiny_models import VOCABULARY, prompt, tiny_model

import penstock
from penstock.errors import InvalidSetting, MemoryTooSmall, PenstockError, UnsupportedModel
from penstock.request import PrefillProgress

NUM_PROMPT_TOKENS = 150
EXACT = 1e-4
RECURRENT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "state_size": 8,
    "pad_token_id": 0,
}
HYBRID = RECURRENT | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


def generate(model, **inputs):
    """16 greedy tokens with their logits; nothing stops them early."""
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**(settings | inputs), return_dict_in_generate=True, output_logits=True)


def assert_same(output, reference):
    assert torch.equal(output.sequences, reference.sequences)
    differences = [float((a - b).abs().max()) for a, b in zip(output.logits, reference.logits, strict=True)]
    assert max(differences) <= EXACT


def ids(num_tokens: int = NUM_PROMPT_TOKENS, seed: int = 1) -> torch.Tensor:
    return torch.tensor([prompt(num_tokens, seed)])


def recurrent_model(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def llama() -> transformers.PreTrainedModel:
    return tiny_model("llama")


# --- the same answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 64])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-sliding", "qwen2-mixed-windows", "phi3-longrope"])
def test_chunks_give_the_logits_of_the_whole_prompt(name, chunk_size):
    model = tiny_model(name)
    reference = generate(model, input_ids=ids())
    with penstock.attach(model, chunk_size=chunk_size) as attachment:
        assert_same(generate(model, input_ids=ids()), reference)
    assert attachment.reading.applied
    assert [chunk.end for chunk in attachment.reading.chunks][-1] == NUM_PROMPT_TOKENS
    assert max(chunk.end - chunk.start for chunk in attachment.reading.chunks) == chunk_size


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_left_padded_batches_are_exact(llama, attention):
    llama.set_attn_implementation(attention)
    short = prompt(90, seed=2)
    batch = torch.tensor([prompt(NUM_PROMPT_TOKENS), [0] * (NUM_PROMPT_TOKENS - 90) + short])
    mask = torch.ones_like(batch)
    mask[1, : NUM_PROMPT_TOKENS - 90] = 0
    reference = generate(llama, input_ids=batch, attention_mask=mask)
    with penstock.attach(llama, chunk_size=7):
        assert_same(generate(llama, input_ids=batch, attention_mask=mask), reference)


def test_embeddings_instead_of_tokens_are_exact(llama):
    embeddings = llama.get_input_embeddings()(ids()).detach()
    reference = generate(llama, inputs_embeds=embeddings)
    with penstock.attach(llama, chunk_size=7) as attachment:
        assert_same(generate(llama, inputs_embeds=embeddings), reference)
    assert attachment.reading.applied


@pytest.mark.parametrize("is_whole_given", [True, False])
def test_a_cache_that_holds_the_beginning_is_continued(llama, is_whole_given):
    """All tokens may be given again, or only those that follow."""

    def continued():
        cache = transformers.DynamicCache(config=llama.config)
        with torch.no_grad():
            llama(ids()[:, :40], past_key_values=cache, use_cache=True)
        given = {"input_ids": ids() if is_whole_given else ids()[:, 40:]}
        return generate(llama, **given, attention_mask=torch.ones_like(ids()), past_key_values=cache)

    reference = continued()
    with penstock.attach(llama, chunk_size=7) as attachment:
        assert_same(continued(), reference)
    assert attachment.reading.num_cached == 40
    assert attachment.reading.num_tokens == NUM_PROMPT_TOKENS - 40


def test_beam_search_is_exact(llama):
    beams = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
    reference = generate(llama, input_ids=ids(), **beams)
    with penstock.attach(llama, chunk_size=7) as attachment:
        output = generate(llama, input_ids=ids(), **beams)
    assert torch.equal(output.sequences, reference.sequences)
    assert float((output.sequences_scores - reference.sequences_scores).abs().max()) <= EXACT
    assert attachment.reading.applied


@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
@pytest.mark.parametrize("how", ["assistant", "prompt lookup"])
def test_assisted_generation_is_exact(name, how):
    model = tiny_model(name)
    help_ = {"assistant_model": tiny_model(name, seed=3)} if how == "assistant" else {"prompt_lookup_num_tokens": 5}
    repeating = torch.tensor([prompt(30) * 5])
    reference = generate(model, input_ids=repeating, **help_)
    with penstock.attach(model, chunk_size=7) as attachment:
        assert_same(generate(model, input_ids=repeating, **help_), reference)
    assert attachment.reading.applied
    assert attachment.reading.num_tokens >= NUM_PROMPT_TOKENS


def test_a_static_cache_is_exact(llama):
    reference = generate(llama, input_ids=ids(), cache_implementation="static")
    with penstock.attach(llama, chunk_size=7) as attachment:
        assert_same(generate(llama, input_ids=ids(), cache_implementation="static"), reference)
    assert attachment.reading.applied


def test_sampling_with_a_seed_is_the_same(llama):
    torch.manual_seed(5)
    reference = generate(llama, input_ids=ids(), do_sample=True)
    with penstock.attach(llama, chunk_size=64):
        torch.manual_seed(5)
        assert_same(generate(llama, input_ids=ids(), do_sample=True), reference)


def test_a_recurrent_model_whose_state_crosses_chunks_is_exact():
    config = transformers.FalconH1Config(**(HYBRID | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 16}))
    model = recurrent_model(config)
    reference = generate(model, input_ids=ids())
    with penstock.attach(model, chunk_size=7):
        assert_same(generate(model, input_ids=ids()), reference)


def test_a_state_under_another_name_is_carried_from_chunk_to_chunk():
    """RWKV calls its cache `state` and generate does not hand one over before the first call."""
    model = causal_model(TROUBLE["rwkv"]())
    reference = generate(model, input_ids=ids())
    with penstock.attach(model, chunk_size=7) as attachment:
        assert_same(generate(model, input_ids=ids()), reference)
    assert attachment.reading.applied


# --- the model around it ------------------------------------------------------------------------------------


def test_detach_leaves_no_trace(llama):
    before = dict(vars(llama))
    reference = generate(llama, input_ids=ids())
    penstock.attach(llama, chunk_size=7)
    penstock.detach(llama)
    assert vars(llama) == before
    assert_same(generate(llama, input_ids=ids()), reference)


def test_calls_outside_generate_are_untouched(llama):
    calls = []
    hook = llama.model.register_forward_hook(lambda *_: calls.append(1))
    with penstock.attach(llama, chunk_size=7), torch.no_grad():
        calls.clear()
        logits = llama(ids()).logits
    hook.remove()
    assert logits.shape[1] == NUM_PROMPT_TOKENS
    assert len(calls) == 1


def test_a_copied_model_is_attached_to_itself(llama):
    with penstock.attach(llama, chunk_size=64):
        twin = copy.deepcopy(llama)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert float(generate(twin, input_ids=ids()).logits[0].abs().max()) == 0
    assert vars(twin)["generate"].call.__self__.reading.applied
    penstock.detach(twin)


def test_progress_is_told_after_every_chunk(llama):
    told: list[PrefillProgress] = []
    with penstock.attach(llama, chunk_size=64, on_progress=told.append):
        generate(llama, input_ids=ids())
    assert [(event.chunk_start, event.chunk_end, event.num_total) for event in told] == [
        (0, 64, 150),
        (64, 128, 150),
        (128, 150, 150),
    ]
    assert told[-1].eta_s == 0
    assert all(event.memory_bytes > 0 and event.tokens_per_s > 0 for event in told)


def test_only_the_last_row_of_logits_is_computed(llama):
    rows = []
    hook = llama.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    with penstock.attach(llama, chunk_size=64):
        rows.clear()
        generate(llama, input_ids=ids(), max_new_tokens=1)
    hook.remove()
    assert rows == [1, 1, 1]


def test_a_short_prompt_is_read_whole_and_said_so(llama):
    with penstock.attach(llama, chunk_size=512) as attachment:
        generate(llama, input_ids=ids(20), use_cache=False)
    assert not attachment.reading.applied
    assert attachment.reading.chunks == ()
    assert "fits one chunk" in attachment.reading.reason


def test_a_pipeline_reads_through_the_chunks(llama, tmp_path):
    from tiny_models import save_tokenizer

    save_tokenizer(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), pad_token="w0")
    pipe = transformers.pipeline("text-generation", model=llama, tokenizer=tokenizer)
    text = " ".join(f"w{token}" for token in prompt(NUM_PROMPT_TOKENS))
    reference = pipe(text, max_new_tokens=8, do_sample=False)
    with penstock.attach(llama, chunk_size=7) as attachment:
        assert pipe(text, max_new_tokens=8, do_sample=False) == reference
    assert attachment.reading.num_tokens == NUM_PROMPT_TOKENS


# --- memory -------------------------------------------------------------------------------------------------


def test_a_tight_budget_makes_smaller_chunks_and_says_so(llama):
    from penstock.plan.machine import resident_bytes

    reference = generate(llama, input_ids=ids())
    with penstock.attach(llama, memory=resident_bytes() + 500_000) as attachment:
        assert_same(generate(llama, input_ids=ids()), reference)
    assert attachment.reading.applied
    assert "to stay within memory" in attachment.reading.adjustments[0]


def test_a_budget_below_what_is_held_is_refused_with_the_numbers(llama):
    with penstock.attach(llama, memory="1MB"), pytest.raises(MemoryTooSmall, match=r"needs \d+ MB .* memory is 1 MB"):
        generate(llama, input_ids=ids())


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: transformers.MambaConfig(**RECURRENT),
        lambda: transformers.JambaConfig(**HYBRID, use_mamba_kernels=False, num_experts=2, attn_layer_offset=1),
    ],
    ids=["mamba", "jamba"],
)
def test_a_model_that_forgets_its_state_is_refused(make):
    with pytest.raises(UnsupportedModel, match="cannot be read in chunks"):
        penstock.attach(recurrent_model(make()), chunk_size=7)


class ForgetsPastItsWindow(transformers.MistralForCausalLM):
    """Right while all is within the window, as a short prompt always is."""

    def forward(self, *args, past_key_values=None, **kwargs):
        if past_key_values is not None and past_key_values.get_seq_length() >= self.config.sliding_window:
            past_key_values = None
        return super().forward(*args, past_key_values=past_key_values, **kwargs)


def test_what_lies_past_a_window_is_tried_on_a_small_copy():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
    config = transformers.MistralConfig(**sizes, intermediate_size=48, num_key_value_heads=2, sliding_window=4096)
    penstock.detach(penstock.attach(transformers.MistralForCausalLM(config).eval()).model)
    with pytest.raises(UnsupportedModel, match="cannot be read in chunks: chunked logits differ"):
        penstock.attach(ForgetsPastItsWindow(config).eval())


@pytest.mark.parametrize("name", ["bamba", "lfm2", "qwen3-5"])
def test_left_padded_batches_of_hybrids_are_exact(name):
    """Of more padding than a chunk has tokens."""
    model, batch = tiny_model(name), torch.tensor([prompt(60), [0] * 20 + prompt(40, seed=2)])
    mask = torch.ones_like(batch)
    mask[1, :20] = 0
    reference = generate(model, input_ids=batch, attention_mask=mask)
    with penstock.attach(model, chunk_size=7):
        assert_same(generate(model, input_ids=batch, attention_mask=mask), reference)


def test_padding_that_a_state_would_remember_is_read_in_one_chunk():
    """Single steps of this model do not mask padding; chunks of several tokens do."""
    config = transformers.FalconH1Config(**(HYBRID | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 16}))
    model = recurrent_model(config)
    batch = torch.tensor([prompt(60), [0] * 20 + prompt(40, seed=2)])
    mask = torch.ones_like(batch)
    mask[1, :20] = 0
    reference = generate(model, input_ids=batch, attention_mask=mask)
    with penstock.attach(model, chunk_size=7):
        assert_same(generate(model, input_ids=batch, attention_mask=mask), reference)
    with penstock.attach(model, chunk_size=1) as attachment:
        assert_same(generate(model, input_ids=batch, attention_mask=mask), reference)
    assert attachment.reading.adjustments == ("tokens 0 to 21 belong together and were read in one chunk",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_cache": False}, "use_cache=False"),
        ({"output_hidden_states": True}, "output_hidden_states=True"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"cache_implementation": "paged"}, "paged"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_chunks_cannot_give_is_refused_with_the_reason(llama, settings, message):
    llama.set_attn_implementation("eager")
    with penstock.attach(llama, chunk_size=7), pytest.raises(PenstockError, match=message):
        generate(llama, input_ids=ids(), **settings)


def test_static_windows_are_refused():
    model = tiny_model("gemma3")
    with penstock.attach(model, chunk_size=7), pytest.raises(InvalidSetting, match="sliding windows"):
        generate(model, input_ids=ids(), cache_implementation="static")


def test_other_objects_and_bad_settings_are_refused(llama):
    with pytest.raises(UnsupportedModel, match="not Linear"):
        penstock.attach(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidSetting, match="chunk_size is 0"):
        penstock.attach(llama, chunk_size=0)
    with pytest.raises(InvalidSetting, match="not attached"):
        penstock.detach(llama)
    with penstock.attach(llama), pytest.raises(InvalidSetting, match="attached already"):
        penstock.attach(llama)


# --- the example --------------------------------------------------------------------------------------------


@pytest.mark.evidence
def test_the_example_writes_the_same_tokens_with_a_lower_peak():
    example = Path(__file__).parents[2] / "examples" / "attach_generate.py"
    done = subprocess.run([sys.executable, str(example)], check=True, capture_output=True, text=True)
    plain, attached = (int(peak) for peak in re.findall(r"peak (\d+) MB", done.stdout))
    assert "same tokens: True" in done.stdout
    assert attached < plain
