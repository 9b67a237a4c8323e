"""A source read in tiles gives the plain encoder's states, and the answer of the plain model."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from lane_ids import SEQ2SEQ_SOURCE
from logit_recorder import LogitRecorder
from tiny_models import VOCABULARY, prompt, save_tokenizer
from tiny_seq2seq import SEQ2SEQ, randomized, save_tiny_seq2seq, tiny_seq2seq

import penstock
from penstock.cache.blocks import BlockPool
from penstock.config import EngineConfig
from penstock.doctor.examination import examine
from penstock.engine.engine import Engine
from penstock.engine.planning import plan
from penstock.errors import InvalidPrompt, InvalidSetting, PromptTooLong, UnknownLane, UnsupportedModel
from penstock.foreign.source_decoder import CrossStates, SourceDecoder
from penstock.foreign.source_encoder import read_source
from penstock.models.seq2seq_spec import seq2seq_spec
from penstock.proof.source import check_encoder
from penstock.request import PrefillProgress

TOLERANCE = 1e-4
NUM_GENERATED = 32
SOURCE = prompt(150)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Callable[[str], tuple[Path, transformers.PreTrainedModel]]:
    made: dict[str, tuple[Path, transformers.PreTrainedModel]] = {}

    def make(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (folder, save_tiny_seq2seq(name, folder))
        return made[name]

    return make


@pytest.fixture
def load(folders):
    engines: list[Engine] = []

    def make(name: str, **settings) -> Engine:
        settings = {"dtype": "float32", "memory": "4GiB", "threads": 1} | settings
        engines.append(Engine.load(str(folders(name)[0]), **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@torch.no_grad()
def states(model, ids, mask=None):
    return model.get_encoder()(ids, attention_mask=torch.ones_like(ids) if mask is None else mask).last_hidden_state


def generated(model, ids):
    """(tokens, logits) of 32 greedy steps that do not end."""
    length = {"max_new_tokens": NUM_GENERATED, "min_new_tokens": NUM_GENERATED}
    result = model.generate(ids, **length, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return result.sequences[0, -NUM_GENERATED:].tolist(), torch.cat(result.logits)


@pytest.mark.parametrize("name", SEQ2SEQ)
@pytest.mark.parametrize(
    "tile", [1, 7, 150, *(pytest.param(tile, marks=pytest.mark.evidence) for tile in (3, 64, 1000))]
)
def test_tiles_of_every_size_give_the_plain_encoders_states(name, tile, folders):
    model, ids = folders(name)[1], torch.tensor([SOURCE])
    assert (read_source(model, ids, tile=tile) - states(model, ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_padding_is_not_attended_to(name, folders):
    model, ids = folders(name)[1], torch.tensor([prompt(50), prompt(50, seed=2)])
    mask = torch.ones_like(ids)
    ids[0, 40:] = mask[0, 40:] = 0
    difference = read_source(model, ids, mask, tile=7) - states(model, ids, mask)
    assert (difference * mask[..., None]).abs().max() <= TOLERANCE


def test_padding_on_the_left_is_exact_or_refused(folders):
    ids = torch.tensor([prompt(50), prompt(50, seed=2)])
    mask = torch.ones_like(ids)
    ids[0, :10] = mask[0, :10] = 0
    for name in SEQ2SEQ:
        model = folders(name)[1]
        if name == "m2m100":
            with pytest.raises(InvalidPrompt, match="padded on the right"):
                read_source(model, ids, mask, tile=7)
            continue
        difference = read_source(model, ids, mask, tile=7) - states(model, ids, mask)
        assert (difference * mask[..., None]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("tiles", [(7, 0), pytest.param((1, 64), marks=pytest.mark.evidence)], ids=str)
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_the_answer_is_that_of_the_plain_model(name, tiles, folders, load):
    model, ids = folders(name)[1], torch.tensor([SOURCE])
    written, reference = generated(model, ids)
    for tile in tiles:
        engine = load(name, chunk_size=tile)
        recorder = LogitRecorder(engine)
        engine.model.lane.rules = dataclasses.replace(engine.model.lane.rules, never=(2,))
        output = engine.generate(SOURCE, max_tokens=NUM_GENERATED)
        assert output.token_ids == tuple(written), f"tile {tile}"
        is_seen = recorder.all.isfinite()
        assert (recorder.all - reference)[is_seen].abs().max() <= TOLERANCE, f"tile {tile}"
        assert engine.lane.after_reading(output.num_prompt_chunks).applied == (tile > 0)
        assert (output.num_prompt_tokens, output.num_computed_tokens) == (len(SOURCE), len(SOURCE))


@pytest.mark.parametrize("name", ["t5-gated-untied", "bart", "m2m100", "t5gemma"])
def test_a_decoder_prompt_in_chunks_gives_the_logits_of_the_whole(name, folders):
    model, ids, answer = folders(name)[1], torch.tensor([SOURCE]), torch.tensor([prompt(40, seed=3)])
    with torch.no_grad():
        reference = model(ids, attention_mask=torch.ones_like(ids), decoder_input_ids=answer).logits[0]
    hidden = read_source(model, ids, tile=64)
    decoder, cross = SourceDecoder(model), CrossStates(num_tokens=len(SOURCE))
    for start in range(0, len(SOURCE), 7):
        decoder.add_keys(cross, hidden[:, start : start + 7], start)
    for chunk_size in (1, 3, 7, 40):
        cache = decoder.cache(cross)
        for start in range(0, 40, chunk_size):
            end = min(start + chunk_size, 40)
            logits = decoder.logits(answer[:, start:end], hidden, cache)
            assert (logits[0] - reference[end - 1]).abs().max() <= TOLERANCE


def test_many_sources_at_once_equal_each_alone(load):
    sources = [prompt(length, seed=length) for length in (1, 5, 40, 97, 150)]
    alone = [load("t5-gated-untied", chunk_size=0).generate(tokens, max_tokens=8).token_ids for tokens in sources]
    engine = load("t5-gated-untied", chunk_size=24)
    together = engine.generate_batch(sources, max_tokens=8)
    assert [output.token_ids for output in together] == alone
    assert not engine.model.lane._readings


def test_a_preempted_source_is_read_again(folders, load):
    """Room for little more than one source: nothing is lost and nothing is mixed up."""
    sources = [prompt(100, seed=seed) for seed in range(3)]
    alone = [load("bart").generate(tokens, max_tokens=40).token_ids for tokens in sources]
    engine = load("bart", chunk_size=32)
    engine.scheduler.pool = engine.scheduler.holdings.pool = BlockPool(16)  # 256 tokens
    assert [output.token_ids for output in engine.generate_batch(sources, max_tokens=40)] == alone
    assert engine.scheduler.num_preemptions


def test_a_source_can_be_cancelled_within_a_chunk(load):
    engine = load("bart", chunk_size=16)
    events = engine.stream(SOURCE, max_tokens=4)
    first = next(events)
    assert isinstance(first, PrefillProgress)
    assert (first.num_total, first.num_computed) == (len(SOURCE), 16 // engine.model.lane.num_passes)
    events.close()
    assert not engine.scheduler.has_work
    assert not engine.model.lane._readings


@pytest.mark.parametrize("name", ["t5", "bart", "t5gemma"])
def test_an_answer_that_is_begun_is_read_in_chunks(name, folders, load):
    model, begun = folders(name)[1], prompt(33, seed=4)
    engine = load(name, chunk_size=7)
    start = list(engine.model.lane.rules.start_tokens)
    length = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    plain = model.generate(torch.tensor([SOURCE]), decoder_input_ids=torch.tensor([start + begun]), **length)
    for given in (begun, " ".join(f"w{token}" for token in begun)):
        output = engine.generate(SOURCE, answer_start=given, max_tokens=8, ignore_eos=True)
        assert list(output.token_ids) == plain[0, -8:].tolist()
    num_positions = engine.model.lane.num_passes * len(SOURCE) + len(start) + len(begun)
    assert output.chunks[-1].end == num_positions
    assert all(chunk.end - chunk.start <= 7 for chunk in output.chunks)


def test_a_start_of_the_answer_is_refused_where_it_cannot_be_read(load, tiny):
    with pytest.raises(PromptTooLong, match=r"begins with 4500 tokens; the decoder has positions for 4500\. Shorten"):
        load("bart").submit(SOURCE, answer_start=[5] * 4499)
    with (
        Engine.load(str(tiny("llama")[0]), memory="4GiB") as engine,
        pytest.raises(InvalidSetting, match="answer_start"),
    ):
        engine.submit([5], answer_start=[6])


def test_a_translation_begins_with_the_forced_language(folders, load):
    model = folders("m2m100")[1]
    ids = torch.tensor([SOURCE[:40]])
    expected = model.generate(ids, max_new_tokens=8, forced_bos_token_id=77, do_sample=False)[0, 1:].tolist()
    engine = load("m2m100", chunk_size=7)
    engine.model.lane.rules = type(engine.model.lane.rules).of(
        transformers.GenerationConfig(decoder_start_token_id=2, forced_bos_token_id=77, num_beams=4)
    )
    assert list(engine.generate(SOURCE[:40], max_tokens=8).token_ids) == expected
    assert engine.model.lane.rules.not_done == ("generation_config asks for num_beams 4; it is not applied",)


def test_bfloat16_tiles_are_no_further_from_float32_than_the_whole_source(folders):
    ids = torch.tensor([SOURCE])
    for name in ("t5", "bart", "t5gemma"):
        exact = states(folders(name)[1], ids)
        model = tiny_seq2seq(name, dtype=torch.bfloat16)
        yardstick = (states(model, ids).float() - exact).abs().max()
        assert (read_source(model, ids, tile=7).float() - exact).abs().max() <= 1.5 * yardstick


@pytest.mark.parametrize("class_name", ["SwitchTransformersConfig", "BigBirdPegasusConfig"])
def test_an_encoder_that_tiles_would_change_is_read_whole_and_says_so(class_name):
    sizes = {"d_model": 32, "num_layers": 2, "num_heads": 2, "d_kv": 16, "d_ff": 32, "vocab_size": 99}
    if class_name == "BigBirdPegasusConfig":
        sizes = {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "vocab_size": 99,
        }
    if class_name == "SwitchTransformersConfig":
        sizes |= {"num_experts": 2, "expert_capacity": 4}
    found = check_encoder(randomized(getattr(transformers, class_name)(**sizes)), is_loaded=True)
    assert not found.exact
    assert "tiles" in found.reason
    verdict = penstock.selfcheck(randomized(getattr(transformers, class_name)(**sizes)))
    assert not verdict.exact
    assert verdict.summary.startswith("read whole (tiles): ")


def test_an_encoder_that_cannot_be_tiled_still_answers(tmp_path):
    """Its blocks are drawn for the whole source; a short one, which it reads without blocks, changes no later one."""
    halves = {f"{half}_{name}": 2 for half in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = transformers.BigBirdPegasusConfig(
        **halves, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=VOCABULARY, block_size=4
    )
    model = randomized(config)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    expected = model.generate(torch.tensor([SOURCE]), max_new_tokens=8, do_sample=False)[0, 1:].tolist()
    with Engine.load(str(tmp_path), chunk_size=16, memory="4GiB", dtype="float32") as engine:
        engine.generate(SOURCE[:9], max_tokens=2)
        output = engine.generate(SOURCE, max_tokens=8)
        facts = engine.lane.after_reading(output.num_prompt_chunks)
    assert list(output.token_ids) == expected
    assert not facts.applied
    assert (facts.boundary, facts.mask_mode) == ("", "")
    assert "read whole" in facts.reason
    assert any("prompts are read whole" in adjustment for adjustment in engine.adjustments)
    with pytest.raises(UnsupportedModel, match="--strict"):
        Engine.load(str(tmp_path), strict=True, memory="4GiB", dtype="float32")


def test_the_verdict_of_a_source_is_kept_and_holds_narrow_weights_to_float32(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = str(folders("t5gemma")[0])
    settings = EngineConfig(dtype="bfloat16", device="cpu")
    assert "not checked yet" in plan(folder, prompt_tokens=9, dtype="bfloat16", memory="1GiB", device="cpu").lane.reason
    with Engine.load(folder, dtype="bfloat16", device="cpu", memory="4GiB", threads=1) as engine:
        assert "exact (tiles): states of tiles agree" in engine.lane.reason
    found = examine(folder, settings)
    assert found.was_kept
    assert found.verdict.real_weights.exact
    assert "exact (tiles)" in plan(folder, prompt_tokens=9, dtype="bfloat16", memory="1GiB", device="cpu").lane.reason


def test_bad_sources_are_refused_in_one_sentence(load):
    engine = load("bart")
    with pytest.raises(InvalidPrompt, match="empty"):
        engine.submit([])
    with pytest.raises(PromptTooLong, match=r"4501 tokens; the model has positions for 4500\. Shorten"):
        engine.submit([5] * 4501)
    with pytest.raises(InvalidSetting, match="no log-probabilities"):
        engine.submit([5], prompt_logprobs=1)
    with pytest.raises(PromptTooLong, match="trained for 160"):
        load("m2m100").submit([5] * 161)
    assert len(load("m2m100", context=200).generate([5] * 161, max_tokens=2).token_ids) == 2


def test_an_answer_ends_where_the_positions_do(tmp_path):
    config = SEQ2SEQ["bart"]()
    config.max_position_embeddings = 20
    randomized(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with Engine.load(str(tmp_path), memory="4GiB", dtype="float32") as engine:
        output = engine.generate(prompt(20), max_tokens=100, ignore_eos=True)
    assert (len(output.token_ids), output.finish_reason) == (19, "length")


def test_a_model_in_training_is_refused():
    with pytest.raises(InvalidSetting, match=r"model\.eval"):
        read_source(tiny_seq2seq("t5").train(), torch.tensor([SOURCE]), tile=8)


def test_reading_leaves_the_model_as_it_was(folders):
    model, ids = folders("t5")[1], torch.tensor([SOURCE])
    before = states(model, ids)
    progress: list[tuple[int, int]] = []
    read_source(model, ids, tile=40, on_progress=lambda done, total: progress.append((done, total)))
    assert torch.equal(states(model, ids), before)
    assert progress[-1] == (6 * 150, 6 * 150)
    assert len(progress) == -(-6 * 150 // 40)


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_the_plan_knows_the_weights_from_the_config(name, folders):
    folder, model = folders(name)
    planned = plan(str(folder), prompt_tokens=90, memory="1GiB", dtype="float32")
    assert planned.lane.id == SEQ2SEQ_SOURCE
    assert planned.prompt.fits
    encoder = model.get_encoder()
    layers = encoder.block if hasattr(encoder, "block") else encoder.layers
    assert seq2seq_spec(model.config.to_dict()).num_passes == 2 * len(layers) + 1


@pytest.mark.parametrize(
    "class_name",
    [
        "T5Config",
        "BartConfig",
        "M2M100Config",
        "T5GemmaConfig",
        "UMT5Config",
        "LEDConfig",
        "LongT5Config",
        "PegasusXConfig",
    ],
)
def test_weights_are_counted_within_a_hundredth(class_name):
    config = getattr(transformers, class_name)()
    with torch.device("meta"):
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert abs(seq2seq_spec(config.to_dict()).num_parameters / num_parameters - 1) < 0.01


def test_a_lane_for_other_models_is_refused(tiny):
    with pytest.raises(UnknownLane, match="encoder-decoder"):
        Engine.load(str(tiny("llama")[0]), lane=SEQ2SEQ_SOURCE)
