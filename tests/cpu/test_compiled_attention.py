"""The C kernel against plain attention, and what it promises: the same bits for every cut, thread count and run."""

import os
import subprocess
import sys

import pytest
import torch
from logit_recorder import LogitRecorder
from paged_attention import paged
from unlike_heads import attended_and_expected

from penstock.attention.backend import AttentionRule, ForwardInputs
from penstock.attention.cpu import CpuAttention
from penstock.cache.storage import KvStorage
from penstock.kernels import build
from penstock.plan.machine import cpu_flags

pytestmark = pytest.mark.usefixtures("compiled")
HAD = [one.id for one in build.INSTRUCTIONS if one.are_had(cpu_flags())]
ONCE = pytest.mark.parametrize("compiled", HAD[:1], indirect=True)  # processes of their own are slow to start

TOLERANCE = 0.02  # values are about 1, and bfloat16 has 8 bits
RULES = {
    "causal": AttentionRule(scale=0.3),
    "window 1": AttentionRule(scale=0.3, window=1),
    "window 40": AttentionRule(scale=0.3, window=40),
    "window 700": AttentionRule(scale=0.3, window=700),
    "softcap": AttentionRule(scale=0.3, softcap=2.0),
    "softcap, window 33": AttentionRule(scale=0.3, softcap=2.0, window=33),
}
CHUNKS = [(0, 1), (0, 2), (0, 37), (99, 100), (64, 128), (63, 65), (70, 75), (300, 361), (1200, 1201), (600, 831)]
STREAMS = [(130, 131), (520, 521), (40, 41), (0, 1), (1023, 1024), (7, 60), (255, 256), (256, 257)]


def attended(chunks, rule=RULES["causal"], layout="one run", *sizes, sinks=None):
    return paged(chunks, rule, layout, *sizes, dtype=torch.bfloat16, sinks=sinks)


@pytest.mark.parametrize("layout", ["one run", "scattered", "short runs"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_it_equals_plain_attention(rule, layout):
    found, expected = attended([*CHUNKS, *STREAMS], rule, layout, 9, 3, 64)
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [
        (1, 1, 8),
        (6, 6, 24),
        (4, 2, 32),
        (8, 1, 80),
        (6, 2, 96),
        (16, 8, 128),
        (5, 5, 192),
        (40, 1, 64),
        (4, 2, 256),
        (6, 2, 512),
        (96, 32, 16),
    ],
)
def test_head_shapes(heads, kv_heads, size):
    for rule in (AttentionRule(scale=size**-0.5), AttentionRule(scale=size**-0.5, window=50, softcap=3.0)):
        found, expected = attended([*CHUNKS, *STREAMS], rule, "short runs", heads, kv_heads, size)
        assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("rule", [RULES["causal"], RULES["window 40"], RULES["softcap"]], ids=str)
def test_a_sink_takes_its_share_and_gives_nothing(rule):
    sinks = torch.tensor([0.0, 3.0, -2.0, 90.0])
    found, expected = attended(CHUNKS, rule, "scattered", sinks=sinks)
    assert (found - expected).abs().max() < TOLERANCE
    assert found[:, 3].abs().max() < 1e-20


def test_it_is_no_further_from_plain_attention_than_torch():
    found, expected = attended([(0, 700)], AttentionRule(scale=0.125), "one run", 9, 3, 64)
    build.use("torch")
    by_torch, _ = attended([(0, 700)], AttentionRule(scale=0.125), "one run", 9, 3, 64)
    assert (found - expected).square().mean() <= 1.05 * (by_torch - expected).square().mean()


class OneSequence:
    """A sequence of 500 tokens in pages, attended in any chunks."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        place = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
        storage = KvStorage(num_layers=1, num_slots=512, num_kv_heads=3, head_size=64, **place)
        for pages in (storage.keys[0], storage.values[0]):
            pages.copy_(torch.randn(pages.shape, generator=generator))
        self.queries = torch.randn(500, 9, 64, generator=generator).bfloat16()
        self.attention = CpuAttention(storage, 16)
        assert self.attention.compiled is not None

    def attend(self, rule, cuts):
        parts = [self._chunk(rule, start, end) for start, end in zip([0, *cuts], [*cuts, 500], strict=True)]
        return torch.cat(parts)

    def _chunk(self, rule, start, end):
        self.attention.begin_step(
            ForwardInputs(
                ids_T=torch.zeros(end - start, dtype=torch.long),
                positions_T=torch.arange(start, end),
                query_starts=(0, end - start),
                context_lens=(end,),
                block_table=(tuple(range(32)),),
                rotary_variants=("default",),
                sequence_ids=(0,),
                logit_rows=torch.zeros(0, dtype=torch.long),
            )
        )
        return self.attention.attend(0, self.queries[start:end], rule)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_row_has_the_same_bits_however_the_prompt_was_cut(rule):
    sequence = OneSequence()
    whole = sequence.attend(rule, [])
    for cuts in ([2, 5, 64, 130, 131 + 2, 400], [250], list(range(7, 494, 7)), list(range(64, 500, 64))):
        assert torch.equal(sequence.attend(rule, cuts), whole), cuts


@pytest.mark.parametrize("rule", [RULES["causal"], RULES["window 40"]], ids=str)
def test_single_tokens_differ_by_rounding_alone(rule):
    sequence = OneSequence()
    singles, whole = sequence.attend(rule, list(range(1, 500))), sequence.attend(rule, [])
    assert (singles.float() - whole.float()).abs().max() <= 2**-7 * whole.float().abs().max()


@pytest.mark.parametrize("cuts", [[], list(range(1, 500))], ids=["one chunk", "single tokens"])
def test_threads_do_not_change_a_bit(cuts):
    sequence, threads = OneSequence(), torch.get_num_threads()
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(sequence.attend(RULES["causal"], cuts))
    torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("heads", [(9, 3, 64), (96, 32, 16)], ids=str)
def test_streams_beside_each_other_have_the_bits_of_one_thread(heads):
    threads, results = torch.get_num_threads(), []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(attended(STREAMS, RULES["causal"], "short runs", *heads)[0])
    torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_chunk_that_holds_the_prompt_gives_the_bits_of_the_whole_prompt(load):
    tokens = list(range(3, 153))
    logits = []
    for chunk_size in (0, 150, 4096, 0):
        engine = load("llama", chunk_size=chunk_size, dtype="bfloat16")
        assert engine.model.lane.attention.compiled is not None
        recorder = LogitRecorder(engine)
        engine.generate(tokens, max_tokens=8, ignore_eos=True)
        logits.append(recorder.all)
    assert all(torch.equal(found, logits[0]) for found in logits)


def test_the_switch_leaves_the_work_to_torch(load):
    assert load("llama", dtype="bfloat16", cpu_kernels="torch").model.lane.attention.compiled is None


STATE = """
from penstock.kernels import build
from penstock.plan.machine import cpu_flags
print(build.kernels().library is not None, build.kernels().reason)
"""


def state(**environment):
    """What a fresh process says of the kernels."""
    return subprocess.Popen(
        [sys.executable, "-c", STATE], env=os.environ | environment, stdout=subprocess.PIPE, text=True
    )


@ONCE
@pytest.mark.evidence  # compiles everything, twice
def test_two_processes_may_build_it_at_once(tmp_path):
    running = [state(XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    assert all(process.communicate()[0].startswith("True") for process in running)
    assert [path.suffix for path in (tmp_path / "penstock" / "kernels").iterdir()] == [".so"]


@ONCE
@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"PATH": "", "CC": ""}, "no C compiler"), ({"CC": "false"}, "cannot compile"), ({"HOME": "/dev/null"}, "kept")],
    ids=["no compiler", "a compiler that fails", "no cache folder"],
)
def test_without_it_there_is_a_reason(environment, reason, tmp_path):
    place = {} if "HOME" in environment else {"XDG_CACHE_HOME": str(tmp_path)}
    said = state(**{"XDG_CACHE_HOME": ""} | place | environment).communicate()[0]
    assert said.startswith("False")
    assert reason in said


THREADS = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(2)
torch.randn(512, 512) @ torch.randn(512, 512)
before = len(os.listdir("/proc/self/task"))
from test_compiled_attention import RULES, OneSequence
OneSequence().attend(RULES["causal"], [])
print(before, len(os.listdir("/proc/self/task")))
"""


@ONCE
def test_it_works_on_the_threads_that_torch_has():
    folders = os.pathsep.join(path for path in sys.path if path)
    shown = subprocess.run(
        [sys.executable, "-c", THREADS, os.path.dirname(__file__)],
        env=os.environ | {"PYTHONPATH": folders},
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(int, shown.stdout.split())
    assert before == after >= 2


def test_layers_have_heads_of_their_own_or_attend_to_what_an_earlier_one_has_stored():
    def make(storage, block, heads):
        attention = CpuAttention(storage, block)
        assert attention.compiled is not None
        return attention

    found, expected = attended_and_expected(make, torch.bfloat16)
    for of_layer, expected_of_layer in zip(found, expected, strict=True):
        for one, other in zip(of_layer, expected_of_layer, strict=True):
            assert (one - other).abs().max() < TOLERANCE
