"""Reads last.json, prints the tables of both engines by shape, writes them into README.md, and draws the curve.

Work that one of the two was not measured with is left out.

`python benchmarks/h200/report.py PENSTOCK_LOG VLLM_LOG... --shape SHAPE --commit HASH` first puts what they printed
into last.json. Of a run that ended before its RESULT the rows that it had printed count.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.bench.gpu import against_limits
from penstock.bench.limits import DeviceLimits
from penstock.bench.work import SHAPES, Work
from penstock.models.quantization import Quantization
from penstock.models.spec import decoder_spec

HERE = Path(__file__).parent
MARK = "<!-- table -->"
CURVE = "qwen3-8b"  # the shape whose trade-off is drawn
TIMES = {
    "prefill_2048": "read 2,048 tokens",
    "prefill_8192": "read 8,192 tokens",
    "prefill_32768": "read 32,768 tokens",
    "prefill_131072": "read 131,072 tokens",
    "tpot_1_1024": "decode step, 1 at 1k",
    "tpot_8_1024": "decode step, 8 at 1k",
    "tpot_64_1024": "decode step, 64 at 1k",
    "tpot_256_1024": "decode step, 256 at 1k",
    "tpot_8_32768": "decode step, 8 at 32k",
} | {
    f"tpot_{size}_1024_sampled_{logits}": f"decode step, {size} at 1k, sampled from {logits} logits"
    for logits in ("flat", "peaked")
    for size in (1, 64, 256)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", nargs="*", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--shape", default=CURVE)
    asked = parser.parse_args()
    last = json.loads((HERE / "last.json").read_text())
    if asked.logs:
        results = [_result(log) for log in asked.logs]
        last[asked.shape] = {
            "commit": asked.commit,
            "penstock": _one(results, "penstock", "optimized-native-text"),
            "vllm": dict(_budgets([result for result in results if result["engine"] == "vllm"])),
            "lane_of_transformers": _one(results, "penstock", "transformers-generic-text"),
            "transformers": _one(results, "transformers", None),
        }
        (HERE / "last.json").write_text(json.dumps(last, indent=1) + "\n")
    print(table(last))
    readme = HERE / "README.md"
    before, _, after = readme.read_text().split(MARK)
    readme.write_text(f"{before}{MARK}\n{table(last)}\n{MARK}{after}")
    _draw(last[CURVE])


def _result(log: Path) -> dict[str, Any]:
    text = log.read_text()
    line = next((line for line in text.splitlines() if line.startswith("RESULT ")), None)
    version = re.search(r"LLM engine \(v([\d.]+)\)", text)  # as vLLM says when it starts
    of_vllm = {} if version is None else {"version": version[1]}
    if line is None:
        engine = (
            {"engine": "vllm", "batched": 8192} if version else {"engine": "penstock", "lane": "optimized-native-text"}
        )
        return engine | of_vllm | _printed(text)
    found = json.loads(line.removeprefix("RESULT "))
    found.get("versions", {}).pop("commit", None)  # a copy of the files may know an older one; --commit says it
    return of_vllm | found


def _printed(text: str) -> dict[str, Any]:
    """Reads the rows of a run that was ended before it printed its RESULT."""
    found: dict[str, Any] = {}
    target = ""
    for name, value in re.findall(r"^([a-z][\w ,]*): (.*)$", text, re.MULTILINE):
        words = name.split()
        if words[0] == "target":
            target = f"_at_{value.split()[0]}_ms"
        elif words[0] == "prefill":
            found[f"prefill_{words[1]}"] = float(value.split()[0]) / 1e3
        elif words[0] == "decode" and value.endswith("tok/s"):
            found[f"tpot_{words[1]}_{words[3]}"] = float(value.split()[0]) / 1e3
        elif words[0] in ("greedy,", "sampled,"):
            found[f"tpot_{words[2]}_{words[4]}_{words[0][:-1]}_{words[1][:-1]}"] = float(value.split()[0]) / 1e3
        elif name == "beside decodes":
            fields = re.findall(r"(\w+)=([\d.e-]+)", value)
            found[f"mixed{target}"] = {key: float(number) for key, number in fields}
        elif name == "offline":
            found[name] = ast.literal_eval(value)
    return found


def _budgets(results: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (tokens of a step, result) of vLLM; one process may have been held to several budgets."""
    for result in results:
        yield str(result["batched"]), result
        for key, value in result.items():
            if key.startswith("mixed_of_"):
                yield key.removeprefix("mixed_of_"), {"mixed": value}


def _one(results: list[dict[str, Any]], engine: str, lane: str | None) -> dict[str, Any]:
    """What all runs of one engine on one lane gave; what came first counts."""
    found: dict[str, Any] = {}
    for result in results:
        found = result | found if result["engine"] == engine and result.get("lane") == lane else found
    return found


def table(last: dict[str, dict[str, Any]]) -> str:
    """Writes a section for each shape."""
    return "\n\n".join("\n".join([f"### {shape}", "", *_lines(shape, found)]) for shape, found in last.items())


def _lines(shape: str, last: dict[str, Any]) -> Iterator[str]:
    ours, theirs = last["penstock"], last["vllm"]
    full = theirs["8192"]
    card = full.get("device", "NVIDIA H200")
    yield f"Commit {last['commit']}, one {card}, both engines one after the other on one machine."
    yield ""
    limits_s = ours.get("least_s") or _least_s(shape, ours)
    yield f"| work | Penstock | vLLM {full['version']} | vLLM / Penstock | limit |"
    yield "|---|---|---|---|---|"
    for key, name in TIMES.items():
        if key not in ours or key not in full:
            continue
        ratio, limit = full[key] / ours[key], _limit(limits_s.get(key), ours[key], full[key])
        yield f"| {name} | {ours[key] * 1e3:.2f} ms | {full[key] * 1e3:.2f} ms | {ratio:.3f} | {limit} |"
    for budget, result in theirs.items():
        if "mixed" not in result or not any(key.startswith("mixed_at_") for key in ours):
            continue
        mixed = result["mixed"]
        target, best = _beside(ours, mixed)
        first, gap = mixed["ttft"] / best["ttft"], mixed["itl_p99"] / best["itl_p99"]
        point = f"65k beside 32 decodes, vLLM's budget {budget}, target {target} ms"
        yield f"| {point}: first token | {best['ttft']:.2f} s | {mixed['ttft']:.2f} s | {first:.3f} | |"
        mine, other = best["itl_p99"] * 1e3, mixed["itl_p99"] * 1e3
        yield f"| {point}: p99 gap | {mine:.1f} ms | {other:.1f} ms | {gap:.3f} | |"
    if "offline" in full:
        mine, other = ours["offline"]["tok_s"], full["offline"]["tok_s"]
        yield f"| 256 requests | {mine:,.0f} tok/s | {other:,.0f} tok/s | {mine / other:.3f} (ours / theirs) | |"
    for key, taken in ours.items():
        if key.startswith("bytes_"):
            gap = taken["planned"] / taken["taken"] - 1
            sizes = f"{taken['planned'] / 2**30:.2f} GiB planned, {taken['taken'] / 2**30:.2f} taken"
            yield f"| memory for {int(key.removeprefix('bytes_')):,} tokens | {sizes} | | {gap:+.1%} | |"
    if "first_token_s" in ours:
        yield f"| first token of a cold process | {ours['first_token_s']:.1f} s | | | |"
    yield from _lane_lines(last.get("lane_of_transformers", {}), last.get("transformers", {}))


def _least_s(shape: str, ours: dict[str, Any]) -> dict[str, float]:
    """What the rows would take at limits that were measured in the same sitting, by a run of other rows."""
    if "limits" not in ours:
        return {}
    config, limits = SHAPES[shape], DeviceLimits(**ours["limits"])
    codes = Quantization(asked=None, stored={}, columns={}, on_card=True) if "quantization_config" in config else None
    work = Work.of_vocabulary(config["vocab_size"])
    return against_limits(decoder_spec(config), work, limits, ours, lambda *_: None, codes)["least_s"]


def _limit(least_s: float | None, *seconds: float) -> str:
    """Writes the limit that was measured beside the rows, if it was; where an engine was faster, the limit is wrong."""
    if least_s is None:
        return ""
    return f"{least_s * 1e3:.4g} ms" + ("" if min(seconds) >= least_s else " is wrong: an engine was faster")


def _lane_lines(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    if not theirs:
        return
    yield ""
    yield f"| on the lane of transformers | Penstock | transformers {theirs['version']} | transformers / Penstock |"
    yield "|---|---|---|---|"
    for key, name in TIMES.items():
        if key in ours and key in theirs:
            mine, other = ours[key] * 1e3, theirs[key] * 1e3
            yield f"| {name} | {mine:.2f} ms | {other:.2f} ms | {other / mine:.1f} |"


def _beside(ours: dict[str, Any], mixed: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The run under a target that comes nearest to lying below the other engine's point in both numbers."""
    points = {key.split("_")[2]: value for key, value in ours.items() if key.startswith("mixed_at_")}
    target = min(
        points,
        key=lambda name: max(points[name]["ttft"] / mixed["ttft"], points[name]["itl_p99"] / mixed["itl_p99"]),
    )
    return target, points[target]


def _draw(last: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ours = {f"{key.split('_')[2]} ms": value for key, value in last["penstock"].items() if key.startswith("mixed_at_")}
    theirs = {f"{budget} tokens": result["mixed"] for budget, result in last["vllm"].items() if "mixed" in result}
    if not ours or not theirs:
        return
    figure, axis = pyplot.subplots(figsize=(7.2, 4.6), layout="constrained")
    for name, points, color, marker in (
        ("Penstock, by latency target", ours, "#1f6f8b", "o"),
        (f"vLLM {last['vllm']['8192']['version']}, by tokens per step", theirs, "#b3432b", "s"),
    ):
        ordered = sorted(points.items(), key=lambda item: item[1]["itl_p99"])
        gaps, firsts = [p["itl_p99"] * 1e3 for _, p in ordered], [p["ttft"] for _, p in ordered]
        axis.plot(gaps, firsts, color=color, marker=marker, label=name)
        below = color == "#1f6f8b"
        labelled = 0.0
        for (label, _), gap, first in zip(ordered, gaps, firsts, strict=True):
            if gap < 1.2 * labelled:
                continue
            labelled = gap
            place = (-8, -14) if below else (-8, 8)
            axis.annotate(label, (gap, first), textcoords="offset points", xytext=place, fontsize=8, color=color)
    axis.set_xlabel("p99 gap between tokens of 32 streams, ms (logarithmic)")
    axis.set_ylabel("first token of a 65k prompt, s")
    axis.set_xscale("log")
    ticks = (20, 50, 100, 200, 500)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlim(15, 900)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right")
    figure.savefig(HERE / "curve.png", dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
