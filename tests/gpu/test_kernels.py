"""The GPU backend against plain attention over whole sequences: on the card, or in Triton's interpreter."""

import os
from importlib.util import find_spec

import pytest
import torch
from dense_attention import dense
from unlike_heads import attended_and_expected

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_in_interpreter.py", allow_module_level=True)

from penstock.attention.backend import AttentionRule, ForwardInputs, HeadNorms, MediaInputs, Rotation
from penstock.attention.cpu import CpuAttention
from penstock.attention.cuda import CudaAttention, DecodeAttention, num_splits
from penstock.attention.flashinfer import FlashInferReader
from penstock.cache.storage import KvStorage
from penstock.models.layers import RmsNorm
from penstock.request import Span

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16
CAUSAL = AttentionRule(scale=0.3)
RULES = {
    "causal": CAUSAL,
    "window 5": AttentionRule(scale=0.3, window=5),
    "window 40": AttentionRule(scale=0.3, window=40),
    "softcap": AttentionRule(scale=0.3, softcap=2.0),
    "softcap, window 33": AttentionRule(scale=0.3, softcap=2.0, window=33),
}
# Whole prompts, later chunks, decodes (one of them the first token), short chunks, and a chunk of no token.
CHUNKS = [(0, 1), (0, 37), (99, 100), (64, 128), (20, 20), (70, 75), (300, 341), (511, 512)]


class Step:
    """Random chunks of several sequences, whose pages lie scattered among slots that hold NaN."""

    def __init__(self, chunks, *, heads=4, kv_heads=2, size=64, dtype=torch.float32, block=BLOCK, layout="scattered"):
        generator = torch.Generator().manual_seed(3)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(dtype)

        self.chunks, self.block = chunks, block
        num_blocks = [-(-end // block) for _, end in chunks]
        free = torch.randperm(sum(num_blocks) + 5, generator=generator).tolist()
        if layout == "one run":
            free = sorted(free, reverse=True)
        self.tables = [tuple(free.pop() for _ in range(count)) for count in num_blocks]
        self.q = [normal(end - start, heads, size) for start, end in chunks]
        self.k, self.v = ([normal(end, kv_heads, size) for _, end in chunks] for _ in range(2))
        self.shape = {"num_layers": 1, "num_slots": block * (sum(num_blocks) + 5), "num_kv_heads": kv_heads}
        self.shape |= {"head_size": size, "dtype": dtype}
        self.num_heads = heads

    def storage(self, device=DEVICE):
        storage = KvStorage(**self.shape, device=device)
        for pages in (storage.keys[0], storage.values[0]):
            pages.fill_(float("nan"))
        return storage

    def slots(self, index, first, last):
        return [self.tables[index][p // self.block] * self.block + p % self.block for p in range(first, last)]

    def inputs(self, spans=()):
        starts = [0]
        for start, end in self.chunks:
            starts.append(starts[-1] + end - start)
        return ForwardInputs(
            ids_T=torch.zeros(starts[-1], dtype=torch.long),
            positions_T=torch.cat([torch.arange(start, end) for start, end in self.chunks]),
            query_starts=tuple(starts),
            context_lens=tuple(end for _, end in self.chunks),
            block_table=self.tables,
            rotary_variants=("default",) * len(self.chunks),
            sequence_ids=tuple(range(len(self.chunks))),
            logit_rows=torch.zeros(0, dtype=torch.long),
            media=MediaInputs(rows_N=torch.zeros(0), features_ND=torch.zeros(0), spans=spans) if spans else None,
        )

    def attended(self, rule, num_processors=None, sinks=None, spans=(), reader=None):
        storage = self.storage()
        for index, (_, end) in enumerate(self.chunks):
            slots = self.slots(index, 0, end)
            storage.keys[0][slots] = self.k[index].to(DEVICE)
            storage.values[0][slots] = self.v[index].to(DEVICE)
        attention = CudaAttention(storage, self.block, num_heads=self.num_heads)
        attention.num_processors = num_processors or attention.num_processors
        if reader is not None:
            attention.reader = reader(storage, self.block, num_heads=self.num_heads)
        attention.begin_step(self.inputs(spans))
        return attention.attend(0, torch.cat(self.q).to(DEVICE), rule, sinks).cpu().float()

    def expected(self, rule, sinks=None, spans=()):
        parts = zip(self.q, self.k, self.v, self.chunks, spans or [()] * len(self.q), strict=True)
        return torch.cat([dense(q, k, v, chunk[0], rule, sinks, span) for q, k, v, chunk, span in parts])


@pytest.mark.parametrize("num_processors", [1, 132], ids=["whole", "split"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_paged_attention_equals_plain_attention(rule, num_processors):
    """With one processor nothing is split; with many, the longest decodes are shared by several programs."""
    step = Step(CHUNKS)
    assert (step.attended(rule, num_processors) - step.expected(rule)).abs().max() < 2e-5


@pytest.mark.parametrize("num_processors", [1, 132], ids=["whole", "split"])
@pytest.mark.parametrize("name", ["causal", "window 5", "softcap"])
def test_sinks_take_their_share(name, num_processors):
    step, sinks = Step(CHUNKS), torch.tensor([0.0, 3.0, -2.0, 9.0])
    found = step.attended(RULES[name], num_processors, sinks.to(DEVICE))
    assert (found - step.expected(RULES[name], sinks)).abs().max() < 2e-5


@pytest.mark.parametrize("name", ["causal", "window 5", "window 40"])
def test_images_see_themselves(name):
    """Of four chunks: two images, none, one that began in an earlier chunk, and one as long as its chunk."""
    step = Step([(0, 60), (99, 100), (40, 70), (16, 48)])
    spans = ((Span(start=3, end=20), Span(start=30, end=59)), (), (Span(start=33, end=50),), (Span(start=16, end=48),))
    found = step.attended(RULES[name], spans=spans)
    assert (found - step.expected(RULES[name], spans=spans)).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(1, 1, 8), (9, 3, 64), (8, 1, 80), (6, 6, 24), (5, 1, 96), (4, 2, 128), (4, 2, 256), (20, 1, 16)],
)
def test_head_shapes(heads, kv_heads, size):
    step = Step([(0, 50), (333, 334), (20, 41), (60, 63)], heads=heads, kv_heads=kv_heads, size=size)
    assert (step.attended(CAUSAL) - step.expected(CAUSAL)).abs().max() < 2e-5


@pytest.mark.parametrize("block", [1, 16, 48, 64, 128])
@pytest.mark.parametrize("layout", ["one run", "scattered"])
def test_page_sizes_and_layouts(block, layout):
    step = Step([(0, 70), (299, 300), (128, 140)], block=block, layout=layout)
    for rule in (CAUSAL, RULES["window 40"]):
        assert (step.attended(rule) - step.expected(rule)).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_half_precision_stays_close(dtype, size):
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("the interpreter multiplies the bits of bfloat16 numbers, not the numbers")
    step = Step([(0, 150), (400, 401), (100, 230)], size=size, dtype=dtype)
    for rule in (AttentionRule(scale=size**-0.5), AttentionRule(scale=size**-0.5, window=40)):
        expected = step.expected(rule)
        assert (step.attended(rule) - expected).norm() < 1e-2 * expected.norm()


def test_a_step_of_decodes_alone_and_one_of_chunks_alone():
    for chunks in ([(n, n + 1) for n in (0, 15, 16, 17, 700)], [(0, 65)], [(3, 3)]):
        step = Step(chunks)
        difference = step.attended(CAUSAL) - step.expected(CAUSAL)
        assert difference.abs().amax() < 2e-5 if difference.numel() else True


def test_static_buffers_give_what_fresh_ones_give_and_padding_is_left_alone():
    step = Step([(n, n + 1) for n in (40, 0, 300, 17)])
    storage = step.storage()
    for index, (_, end) in enumerate(step.chunks):
        slots = step.slots(index, 0, end)
        storage.keys[0][slots], storage.values[0][slots] = step.k[index].to(DEVICE), step.v[index].to(DEVICE)
    written = storage.keys[0].clone()
    attention = DecodeAttention(storage, BLOCK, num_heads=step.num_heads, max_rows=8, max_context=512)
    for rule in (CAUSAL, RULES["window 40"]):
        attention.begin_step(step.inputs())
        attention.use_rows(6)
        q = torch.cat([*step.q, torch.full((2, *step.q[0].shape[1:]), float("nan"))]).to(DEVICE)
        k = torch.stack([k[-1] for k in step.k] + [q[-1, :2].cpu()] * 2).to(DEVICE)
        v = torch.stack([v[-1] for v in step.v] + [q[-1, :2].cpu()] * 2).to(DEVICE)
        attended = attention.attend(0, attention.store(0, q, k, v, None), rule)[:4].cpu()
        assert (attended - step.expected(rule)).abs().max() < 2e-5
    assert torch.equal(storage.keys[0].nan_to_num(), written.nan_to_num())


@pytest.mark.parametrize("num_half", [0, 8, 20, 40])
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "normed"])
def test_keys_are_rotated_into_the_pages_as_on_the_cpu(num_half, is_normed):
    step = Step([(0, 20), (33, 34), (40, 40), (100, 117)], heads=6, kv_heads=3, size=80)
    num_tokens = sum(map(len, step.q))
    generator = torch.Generator().manual_seed(5)
    # Queries, keys and values are parts of one product, so that their rows are further apart than they are wide.
    product = torch.randn(num_tokens, 12 * 80, generator=generator)
    angles = torch.rand(num_tokens, 1, num_half, generator=generator) * 100
    pages, rotated = [], []
    for device, backend in ((torch.device("cpu"), CpuAttention), (DEVICE, CudaAttention)):
        parts = [part.unflatten(-1, (-1, 80)) for part in product.to(device).split([480, 240, 240], -1)]
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        rotation = Rotation(cos_T1R=cos, sin_T1R=sin) if num_half else None
        storage = step.storage(device)
        options = {"num_heads": 6} if backend is CudaAttention else {}
        attention = backend(storage, BLOCK, **options)
        attention.begin_step(step.inputs())
        if is_normed:  # heads of queries may lie apart, with their gates between them
            parts[0] = torch.cat([parts[0], parts[0]], -1)[..., :80]
        norms = HeadNorms(q=norm(80, 1, device), k=norm(80, 2, device)) if is_normed else None
        rotated.append(attention.store(0, *parts, rotation, norms).cpu())
        pages.append(torch.stack([storage.keys[0], storage.values[0]]).cpu())
    assert (rotated[0] - rotated[1]).abs().max() < 1e-5
    assert torch.equal(pages[0].isnan(), pages[1].isnan()), "the same slots are written"
    assert (pages[0] - pages[1]).nan_to_num().abs().max() < 1e-5


def norm(size, seed, device):
    weight = torch.rand(size, generator=torch.Generator().manual_seed(seed)) + 0.5
    return RmsNorm(weight=weight.to(device), eps=1e-5)


def test_splits_share_the_work_and_stay_few():
    import numpy as np

    assert num_splits(np.array([32_768] * 8), 8, 264, 64) == 4  # 256 programs at once
    assert num_splits(np.array([1024] * 256), 8, 264, 64) == 1  # there is enough work already
    assert num_splits(np.array([1024]), 8, 264, 64) == 8  # no share is smaller than it is worth
    assert num_splits(np.array([100_000]), 1, 264, 10) == 10  # bounded by the memory of the partial results


@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("flashinfer") is None, reason="needs FlashInfer on a GPU"
)
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("chunks", [CHUNKS, [(5, 6), (0, 300), (900, 1024), (64, 500)], [(0, 200), (3, 4), (10, 90)]])
def test_flashinfer_agrees_with_our_kernels_beside_decodes(chunks, block):
    """The third step has a decode between its wide chunks, so our own kernels attend for all of it."""
    step = Step(chunks, heads=8, kv_heads=2, size=128, dtype=torch.bfloat16, block=block)
    rule = AttentionRule(scale=128**-0.5)
    found, exact = step.attended(rule, reader=FlashInferReader), step.expected(rule)
    assert found.isfinite().all()
    assert (found - exact).abs().max() <= 1.5 * (step.attended(rule) - exact).abs().max()


@pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("flashinfer") is None, reason="needs FlashInfer on a GPU"
)
@pytest.mark.parametrize("chunk", [(0, 300), (900, 1024), (64, 501)])
def test_flashinfer_reads_one_run_of_pages(chunk):
    rule = AttentionRule(scale=0.1)
    step = Step([(5, 6), chunk], heads=8, kv_heads=2, size=128, dtype=torch.bfloat16, block=64, layout="one run")
    found, exact = step.attended(rule, reader=FlashInferReader), step.expected(rule)
    assert found.isfinite().all()
    assert (found - exact).abs().max() <= 1.5 * (step.attended(rule) - exact).abs().max()


def test_layers_have_heads_of_their_own_or_attend_to_what_an_earlier_one_has_stored():
    def make(storage, block, num_heads):
        return CudaAttention(storage, block, num_heads=num_heads)

    found, expected = attended_and_expected(make, device=DEVICE)
    for of_layer, expected_of_layer in zip(found, expected, strict=True):
        for one, other in zip(of_layer, expected_of_layer, strict=True):
            assert (one - other).abs().max() < 2e-5
