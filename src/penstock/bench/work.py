"""The fixed work that GPUs are measured with, and how it is given to an engine, ours or another.

Prompts read alone, batches that write, a long prompt beside decodes, a full queue. Token ids come from seeds and
weights may be random, so the figures depend on no file. Times are seconds. Nothing but Python is imported: this file
also runs in the environment of another engine.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from penstock.prompt.random_tokens import random_tokens
from penstock.trace.percentile import percentile

Report = Callable[[str, object], None]
Config = dict[str, Any]
CONTEXT, MAX_RUNNING = 140_000, 256  # what every engine is given
LARGEST_WEIGHT = 1e-3  # as vLLM draws its dummy weights: how fast a card multiplies depends on what it multiplies


def _decoder(kind: str, *, layers: int, width: int, mlp: int, heads: tuple[int, int, int], **others: Any) -> Config:
    """`heads`: those of queries, those of keys and values, and the size of one."""
    num_heads, num_kv_heads, head_size = heads
    usual: Config = {"vocab_size": 151936, "max_position_embeddings": 262144, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
    usual |= {"tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False}
    usual |= {"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": mlp}
    sizes |= {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_size}
    name = kind.title().replace("_", "")
    return usual | sizes | {"architectures": [f"{name}ForCausalLM"], "model_type": kind} | others


def _experts(count: int, chosen: int, width: int) -> Config:
    sizes = {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width}
    return sizes | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


_DELTA: Config = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "shared_expert_intermediate_size": 512,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "partial_rotary_factor": 0.25,
    **_experts(256, 10, 512),
}
# Granite 4.0 H Tiny, less 16 of its 40 layers.
_MAMBA: Config = {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4}
_MAMBA |= {"mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "position_embedding_type": "nope"}
_MAMBA |= {"layer_types": ["attention" if layer in (5, 15) else "mamba" for layer in range(24)], "logits_scaling": 6}
_MAMBA |= {"num_local_experts": 64, "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "vocab_size": 100352}
_MAMBA |= {"embedding_multiplier": 12, "attention_multiplier": 1 / 128, "residual_multiplier": 0.22}
_MAMBA |= {"architectures": ["GraniteMoeHybridForCausalLM"]}
_LLAMA: Config = {"vocab_size": 128256, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
# As published but for the longest context; its scaled positions are what vLLM asks for.
_GPT_OSS: Config = {"vocab_size": 201088, "attention_bias": True, "rms_norm_eps": 1e-5, "sliding_window": 128}
_GPT_OSS |= {"num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
_GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"] * 12, "rope_theta": 150000}
_GPT_OSS_ROPE: Config = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}
_GPT_OSS |= {"rope_scaling": _GPT_OSS_ROPE, "rope_parameters": _GPT_OSS_ROPE | {"rope_theta": 150000}}
_GPT_OSS_WHOLE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
_GPT_OSS |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _GPT_OSS_WHOLE}}
# The config.json of each shape, as every engine reads it. Positions are not scaled: no step's time depends on it.
SHAPES: dict[str, Config] = {
    "qwen3-8b": _decoder("qwen3", layers=36, width=4096, mlp=12288, heads=(32, 8, 128)),
    "qwen3-30b-a3b": _decoder(
        "qwen3_moe", layers=48, width=2048, mlp=6144, heads=(32, 4, 128), **_experts(128, 8, 768)
    ),
    "64-experts-of-1408": _decoder(
        "qwen2_moe",
        layers=24,
        width=2048,
        mlp=5632,
        heads=(16, 16, 128),
        **_experts(64, 6, 1408),
        shared_expert_intermediate_size=2 * 1408,
    ),
    "qwen3-next": _decoder("qwen3_next", layers=24, width=2048, mlp=5120, heads=(16, 2, 256), **_DELTA),
    "granite-4.0-h": _decoder(
        "granitemoehybrid", layers=24, width=1536, mlp=512, heads=(12, 4, 128), **_MAMBA, tie_word_embeddings=True
    ),
    "gpt-oss-20b": _decoder("gpt_oss", layers=24, width=2880, mlp=2880, heads=(64, 8, 64), **_GPT_OSS),
    "llama-3.2-1b": _decoder("llama", layers=16, width=2048, mlp=8192, heads=(32, 8, 64), **_LLAMA),
    "qwen3-0.6b": _decoder("qwen3", layers=28, width=1024, mlp=3072, heads=(16, 8, 128), tie_word_embeddings=True),
    "tiny": _decoder("qwen3", layers=2, width=64, mlp=128, heads=(4, 2, 16), vocab_size=4096),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; greedily unless said."""

    temperature: float = 0.0
    top_p: float = 1.0


GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_p=0.95)
# Random weights give logits that are all but equal; times this, about fifty of 150,000 tokens stay.
SHARPENING = 170_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    prompt_lengths: tuple[int, ...] = (2048, 8192, 32768, 131072)
    batches: tuple[tuple[int, int], ...] = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (8, 32768))  # of a context
    sampled_batches: tuple[tuple[int, int], ...] = ((1, 1024), (64, 1024), (256, 1024))
    num_decode_steps: int = 128
    num_decoders: int = 32
    decoder_context: int = 2048
    decoder_tokens: int = 400
    long_prompt: int = 65536
    num_quiet_steps: int = 60  # before the long prompt arrives
    queue: tuple[int, int, int] = (256, 4096, 256)  # requests, and the most tokens that one reads and writes
    vocabulary: int = 150_000

    @classmethod
    def of_vocabulary(cls, size: int) -> Work:
        """Makes the work for a model that knows so many tokens."""
        return cls(vocabulary=min(cls().vocabulary, size))

    def tokens(self, count: int, seed: int) -> tuple[int, ...]:
        return tuple(random_tokens(count, seed, first=10, end=self.vocabulary))

    def requests(self) -> list[tuple[int, int]]:
        """Draws (prompt tokens, tokens to write) of each request in the full queue."""
        generator = random.Random(1)
        count, most_read, most_written = self.queue
        return [
            (generator.randint(most_read // 32, most_read), generator.randint(most_written // 4, most_written))
            for _ in range(count)
        ]


class Subject(Protocol):
    """An engine as measurements see it: token ids instead of text, and no end before the last token."""

    sampling: Sampling  # of the requests that come next

    @property
    def has_work(self) -> bool: ...

    def submit(self, prompt: Sequence[int], num_tokens: int) -> int: ...

    def step(self) -> Collection[int]:
        """Runs one step and names the requests that it gave a token."""
        ...

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> None:
        """Answers all of them; the device is done when it returns."""
        ...


class WorkSubject(Subject, Protocol):
    """An engine that the whole fixed work is run over."""

    def sharpen(self, factor: float) -> None:
        """Multiplies the weights of the head, so that few tokens are likely."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What running streams saw of a long prompt, from its arrival to its first token, or until the time ran out."""

    request: int  # the long prompt
    gaps_s: tuple[float, ...]  # of all streams; one that got nothing has one gap, the whole wait
    num_written: int
    seconds: float

    def gap_s(self, share: float) -> float:
        """Tells the gap that this share of all gaps does not exceed."""
        return percentile(self.gaps_s, share)


class Streams:
    """Running streams, and the gaps between their tokens."""

    def __init__(self, subject: Subject, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        self.subject = subject
        self.ids = [subject.submit(prompt, num_tokens) for prompt in prompts]
        self.quiet_gaps_s: list[float] = []  # while no other prompt is read
        self._last_at: dict[int, float] = {}

    def run_quietly(self, num_steps: int) -> None:
        """Takes more steps than these, and as many as it needs for the first token of each stream."""
        while len(self._last_at) < len(self.ids) or num_steps >= 0:
            self._step(self.quiet_gaps_s)
            num_steps -= 1

    def read_beside(self, prompt: Sequence[int], *, most_seconds: float = math.inf) -> Beside:
        arrived_at = now = time.perf_counter()
        self._last_at = dict.fromkeys(self.ids, arrived_at)
        request, written = self.subject.submit(prompt, 1), frozenset[int]()
        gaps: list[float] = []
        while request not in written and now - arrived_at < most_seconds:
            written = self._step(gaps)
            now = time.perf_counter()
        num_written = len(gaps)
        gaps += [now - at for at in self._last_at.values() if at == arrived_at]
        return Beside(request=request, gaps_s=tuple(gaps), num_written=num_written, seconds=now - arrived_at)

    def write(self, num_tokens: int, *, until: float = math.inf) -> tuple[int, float]:
        """Writes so many tokens of the answer that begins last, once all have begun; (tokens of all, seconds).

        Others write meanwhile and are asked for more. `until`: by the clock; two steps are timed at least.
        """
        self.run_quietly(0)
        self.subject.step()
        last, num_steps, num_given, num_written = list(self._last_at)[-1], 0, 0, 0
        began = time.perf_counter()
        while num_given < num_tokens and (num_steps < 2 or time.perf_counter() < until) and self.subject.has_work:
            written = self.subject.step()
            num_steps, num_given, num_written = num_steps + 1, num_given + (last in written), num_written + len(written)
        return num_written, time.perf_counter() - began

    def run_to_end(self) -> None:
        while self.subject.has_work:
            self._step(self.quiet_gaps_s)

    def _step(self, gaps: list[float]) -> frozenset[int]:
        written = frozenset(self.subject.step())
        now = time.perf_counter()
        for request in written.intersection(self.ids):
            if request in self._last_at:
                gaps.append(now - self._last_at[request])
            self._last_at[request] = now
        return written


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Gaps between the tokens of each decoder, in quiet and beside the long prompt, whose first token takes `ttft`."""

    ttft: float
    itl_quiet_p50: float
    itl_p50: float
    itl_p99: float
    itl_max: float
    n: int


class WorkRun:
    """The work, given to one engine part by part; what it took, under the keys that every engine prints."""

    def __init__(self, subject: WorkSubject, work: Work, report: Report) -> None:
        self.subject = subject
        self.work = work
        self.report = report

    def run(self, parts: str) -> dict[str, Any]:
        """`parts`: p prompts, d decodes, m a long prompt beside decodes, o a full queue; last, s sampled decodes."""
        every: dict[str, Callable[[], dict[str, Any]]] = {
            "p": self._read_prompts,
            "d": self._write_batches,
            "m": lambda: {"mixed": asdict(self.beside_decodes())},
            "o": self._full_queue,
            "s": self._write_sampled,
        }
        found: dict[str, Any] = {}
        for part in parts:
            found |= every[part]()
        return found

    def seconds(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> float:
        """Times the prompts from submission to the last token of all."""
        started_at = time.perf_counter()
        self.subject.run(prompts, num_tokens)
        return time.perf_counter() - started_at

    def beside_decodes(self) -> Mixed:
        work = self.work
        prompts = [work.tokens(work.decoder_context, seed) for seed in range(work.num_decoders)]
        streams = Streams(self.subject, prompts, work.decoder_tokens)
        streams.run_quietly(work.num_quiet_steps)
        beside = streams.read_beside(work.tokens(work.long_prompt, 99))
        streams.run_to_end()
        found = Mixed(
            ttft=beside.seconds,
            itl_quiet_p50=percentile(streams.quiet_gaps_s, 0.5),
            itl_p50=beside.gap_s(0.5),
            itl_p99=beside.gap_s(0.99),
            itl_max=beside.gap_s(1.0),
            n=len(beside.gaps_s),
        )
        self.report("beside decodes", found)
        return found

    def _read_prompts(self) -> dict[str, Any]:
        found = {}
        for length in self.work.prompt_lengths:
            num_runs = 4 if length < 100_000 else 2
            seconds = min(self.seconds([self.work.tokens(length, seed)], [1]) for seed in range(num_runs))
            found[f"prefill_{length}"] = seconds
            self.report(f"prefill {length}", f"{seconds * 1e3:.1f} ms, {length / seconds:.0f} tok/s")
        return found

    def _write_batches(self) -> dict[str, Any]:
        found = {}
        for size, context in self.work.batches:
            found[f"tpot_{size}_{context}"] = self._step_s("decode", size, context)
        return found

    def _write_sampled(self) -> dict[str, Any]:
        """Greedy and sampled in turns, from flat logits, then from peaked ones; the weights are not put back."""
        found = {}
        for logits in "flat", "peaked":
            if logits == "peaked":
                self.subject.sharpen(SHARPENING)
            for size, context in self.work.sampled_batches:
                for name, sampling in {"greedy": GREEDY, "sampled": SAMPLED}.items():
                    self.subject.sampling = sampling
                    found[f"tpot_{size}_{context}_{name}_{logits}"] = self._step_s(f"{name}, {logits},", size, context)
        self.subject.sampling = GREEDY
        return found

    def _step_s(self, name: str, size: int, context: int) -> float:
        """Times steps of all answers together, from the one after the last has begun."""
        num_steps, prompts = self.work.num_decode_steps, [self.work.tokens(context, seed) for seed in range(size)]
        step_s = min(self._written_together_s(prompts, num_steps) for _ in range(2)) / num_steps
        self.report(f"{name} {size} at {context}", f"{step_s * 1e3:.3f} ms per step, {size / step_s:.0f} tok/s")
        return step_s

    def _written_together_s(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        streams = Streams(self.subject, prompts, num_tokens + sum(map(len, prompts)) // 4096 + 16)
        _, seconds = streams.write(num_tokens)
        streams.run_to_end()
        return seconds

    def _full_queue(self) -> dict[str, Any]:
        requests = self.work.requests()
        prompts = [self.work.tokens(length, seed) for seed, (length, _) in enumerate(requests)]
        seconds = self.seconds(prompts, [count for _, count in requests])
        num_in, num_out = sum(length for length, _ in requests), sum(count for _, count in requests)
        offline = {"s": seconds, "tin": num_in, "tout": num_out, "tok_s": (num_in + num_out) / seconds}
        self.report("offline", offline)
        return {"offline": offline}
