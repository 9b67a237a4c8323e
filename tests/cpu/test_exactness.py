"""A prompt read in chunks gives what the whole prompt gives, and both give what transformers gives."""

import pytest
import torch
from chunk_matrix import SUBJECTS, distances
from logit_recorder import LogitRecorder
from tiny_models import CONFIGS, LATER, RECURRENT, prompt, reference_logits

TOLERANCE = 1e-4
NUM_GENERATED = 32
PROMPT = prompt(150)
BESIDE_OTHERS = ("ministral3", "cohere2", "hunyuan-dense", "nemotron")  # of those whose parts are tried less


def as_evidence(names):
    return [pytest.param(name, marks=pytest.mark.evidence) for name in names]


def read(engine, tokens=PROMPT, **sampling):
    """(logits of each generated token, output) of a greedy run that ignores the end token."""
    recorder = LogitRecorder(engine)
    output = engine.generate(tokens, max_tokens=NUM_GENERATED, ignore_eos=True, **sampling)
    return recorder.all, output


@pytest.fixture(scope="module")
def wholes():
    return {}


@pytest.fixture
def whole_prompt(load, wholes):
    """What `read` gives of the prompt in one chunk, for the name of a model; read once for all tests."""

    def read_once(name):
        if name not in wholes:
            wholes[name] = read(load(name, chunk_size=0))
        return wholes[name]

    return read_once


@pytest.mark.parametrize("chunk_sizes", [(7, 64), pytest.param((1, 3, 16, 512), marks=pytest.mark.evidence)], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_chunk_size_equals_the_whole_prompt_and_transformers(name, chunk_sizes, tiny, load, whole_prompt):
    whole, whole_output = whole_prompt(name)
    assert len(whole_output.chunks) == 1
    model = tiny(name)[1]
    tokens = [*PROMPT, *whole_output.token_ids]
    reference = reference_logits(model, tokens[:-1])[len(PROMPT) - 1 :]
    assert (whole - reference).abs().max() <= TOLERANCE
    assert whole_output.token_ids == tuple(reference.argmax(-1).tolist())
    for chunk_size in chunk_sizes:
        engine = load(name, chunk_size=chunk_size)
        logits, output = read(engine)
        fewest = -(-len(PROMPT) // chunk_size)
        # Chunks of recurrent models end with blocks, where their state can be saved.
        assert len(output.chunks) == (engine.plan(len(PROMPT)).num_chunks if name in RECURRENT else fewest)
        assert len(output.chunks) >= fewest
        assert (logits - whole).abs().max() <= TOLERANCE, f"chunk size {chunk_size}"
        assert output.token_ids == whole_output.token_ids, f"chunk size {chunk_size}"


@pytest.mark.evidence
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_chunk_size_equals_the_whole_prompt_and_transformers_up_to_2600_tokens(name, tmp_path):
    for subject in SUBJECTS[name](tmp_path):
        found = distances(subject)
        print(f"{name}: {subject.num_tokens} tokens, {found}", flush=True)
        assert found.is_right, f"{subject.num_tokens} tokens: {found}"


@pytest.mark.parametrize(
    "overlaps", [((16, 5),), pytest.param(((7, 6), (64, 17)), marks=pytest.mark.evidence)], ids=["one", "others"]
)
@pytest.mark.parametrize("name", [*sorted(set(CONFIGS) - RECURRENT - LATER), *as_evidence(sorted(LATER - RECURRENT))])
def test_overlap_changes_nothing(name, overlaps, load, whole_prompt):
    whole, whole_output = whole_prompt(name)
    for chunk_size, overlap in overlaps:
        logits, output = read(load(name, chunk_size=chunk_size, overlap=overlap))
        assert output.chunks[1].start == chunk_size - overlap
        assert (logits - whole).abs().max() <= TOLERANCE
        assert output.token_ids == whole_output.token_ids


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefix_hit_changes_nothing(name, load, whole_prompt):
    whole, whole_output = whole_prompt(name)
    engine = load(name, chunk_size=16)
    # Another question about the same text, of a length that gives the same rotary table.
    read(engine, PROMPT[:120])
    logits, output = read(engine)
    assert output.num_cached_tokens == 112
    assert output.chunks[0].start == 112
    assert (logits - whole).abs().max() <= TOLERANCE
    assert output.token_ids == whole_output.token_ids


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3",
        "phi3-longrope",
        "gemma4-e",
        "gemma4-moe",
        "qwen2-mixed-windows",
        "gemma2",
        "qwen3-moe",
        "gpt-oss",
        "ministral3",
        "cohere2",
        "hunyuan-dense",
        "nemotron",
    ],
)
def test_many_requests_at_once_equal_each_alone(name, load):
    prompts = [prompt(length, seed=length) for length in (1, 5, 40, 97, 150)]
    alone = [read(load(name, chunk_size=0), tokens)[1].token_ids for tokens in prompts]
    engine = load(name, chunk_size=24)
    together = engine.generate_batch(prompts, max_tokens=NUM_GENERATED, ignore_eos=True)
    assert [output.token_ids for output in together] == alone


@pytest.mark.parametrize("name", ["glm4", "apertus"])
def test_weights_in_eight_bits_say_nearly_the_same(name, load):
    """Rotated pairs are put in order before they are packed, and MLPs without a gate are packed too."""
    exact, _ = read(load(name, chunk_size=0))
    packed, _ = read(load(name, chunk_size=16, quantize="int8"))
    assert 0 < (packed[0] - exact[0]).norm() < 0.1 * exact[0].norm()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_chunk_as_large_as_the_prompt_is_bitwise_the_whole_prompt(name, load):
    whole, _ = read(load(name, chunk_size=0))
    for chunk_size in (150, 151, 4000):
        assert torch.equal(read(load(name, chunk_size=chunk_size))[0], whole)
    assert torch.equal(read(load(name, chunk_size=0))[0], whole)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_bfloat16_in_chunks_is_no_further_from_float32_than_the_whole_prompt(name, load):
    exact, _ = read(load(name, chunk_size=0))
    whole, _ = read(load(name, chunk_size=0, dtype="bfloat16"))
    yardstick = (whole[0] - exact[0]).abs().max()
    for chunk_size in (1, 7, 64):
        logits, _ = read(load(name, chunk_size=chunk_size, dtype="bfloat16"))
        assert (logits[0] - exact[0]).abs().max() <= 1.5 * yardstick


def test_the_rotary_table_is_fixed_by_the_prompts_length(tiny, load):
    """Longrope: a prompt past the original context uses the long factors from its first chunk on."""
    name = "phi3-longrope"
    for length in (60, 96, 97, 140):
        tokens = prompt(length)
        reference = reference_logits(tiny(name)[1], tokens)[-1]
        recorder = LogitRecorder(engine := load(name, chunk_size=16))
        engine.generate(tokens, max_tokens=1)
        assert (recorder.all[0] - reference).abs().max() <= TOLERANCE
