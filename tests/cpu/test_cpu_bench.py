"""How `penstock bench cpu` looks, and what its limits say."""

from penstock.bench.cpu import CpuBench, CpuReport, Job, MemoryRow, Row, fastest_ways, judged
from penstock.bench.limits import DeviceLimits, least_step_s
from penstock.cli.cpu import show_cpu
from penstock.engine.engine import Engine
from penstock.models.files import resolve
from penstock.models.quantization import Type, matrix_bytes, quantization_of
from penstock.models.spec import decoder_spec


def test_the_table_shows_ratios_to_the_best_of_the_others(capsys):
    speeds = {"penstock bfloat16": 300.0, "penstock packed": 150.0, "transformers bfloat16": 100.0}
    speeds |= {"transformers float32": 60.0, "llama.cpp q8_0": 120.0}
    rows = [
        Row(part="reading", what="64 tokens", who=who, tokens_per_s=speed, samples=[speed], share_of_limit=0.25)
        for who, speed in speeds.items()
    ]
    memory = [MemoryRow(who="penstock packed", num_tokens=64, base_bytes=300_000_000, peak_bytes=450_000_000)]
    limits = DeviceLimits(product_gflops=400, read_gb_per_s=40)
    when = {"started_at": "2026-01-01T00:00:00+00:00", "processor": "p", "versions": {"penstock": "0"}}
    work = {"model": "m", "threads": 2, "repeats": 3, "limits": limits, "text_sha256": ""}
    show_cpu(CpuReport(**when, **work, rows=rows, memory=memory, quality=[]))
    lines = capsys.readouterr().out.splitlines()
    ours = next(line for line in lines if "penstock packed" in line and "reading" in line)
    assert [cell.strip() for cell in ours.strip("│").split("│")][3:] == ["150.0", "1.50", "1.25", "0.50", "25%"]
    assert any("450 MB, 150 of it beyond its libraries" in line for line in lines)


def test_longer_prompts_are_given_to_the_fastest_way_of_each_program():
    speeds = {"penstock bfloat16": 300.0, "penstock packed": 350.0, "llama.cpp q8_0": 120.0, "llama.cpp bfloat16": 90.0}
    rows = [Row(part="writing", what="64 tokens", who=who, tokens_per_s=s, samples=[s]) for who, s in speeds.items()]
    assert fastest_ways(rows, {who: who.split()[0] for who in speeds}) == {"penstock packed", "llama.cpp q8_0"}


def test_works_take_turns_and_their_medians_count():
    order: list[str] = []

    def work(who: str, seconds: list[float]) -> Job:
        def run(seed: int) -> float:
            order.append(f"{who}{seed}")
            return seconds[seed]

        return Job(what="8 tokens", who=who, num_tokens=8, run=run)

    bench = CpuBench("m", repeats=2, say=lambda line: None)
    rows = bench.in_turns("streams", [work("a", [1, 2, 4, 8]), work("b", [8, 8, 4, 1])], rounds=2)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
    assert [(row.who, row.tokens_per_s, row.samples) for row in rows] == [
        ("a", 3.0, [8.0, 4.0, 2.0, 1.0]),
        ("b", 1.5, [1.0, 1.0, 2.0, 8.0]),
    ]


def test_limits_are_measured_before_and_after_the_rows_and_the_larger_ones_hold(tiny):
    happened: list[str] = []
    found = [
        DeviceLimits(product_gflops=1.0, read_gb_per_s=50.0),
        DeviceLimits(product_gflops=400.0, read_gb_per_s=1.0),
    ]

    def measure_limits(threads: int) -> DeviceLimits:
        happened.append(f"limits {threads}")
        return found[happened.count(f"limits {threads}") - 1]

    def say(line: str) -> None:
        happened.append(line.split()[0])

    chosen = {"repeats": 1, "lengths": (16,), "threads": 1}
    model = str(tiny("llama")[0])
    report = CpuBench(model, say=say, measure_limits=measure_limits, **chosen).run(("reading", "writing"))
    assert happened == ["limits 1", "reading", "reading", "writing", "writing", "limits 1"]
    assert report.limits == DeviceLimits(product_gflops=400.0, read_gb_per_s=50.0)
    shares = [row.share_of_limit for row in report.rows]
    assert len(shares) == 2
    assert all(0 < share < 1 for share in shares)
    assert report.limit_faults == ()


def test_a_row_beyond_its_limit_is_reported_as_a_fault_of_the_limit(tiny, capsys):
    row = Row(part="reading", what="16 tokens", who="penstock bfloat16", tokens_per_s=1e6, samples=[1e6])
    low, high = (
        DeviceLimits(product_gflops=1e-3, read_gb_per_s=1.0),
        DeviceLimits(product_gflops=1e6, read_gb_per_s=1.0),
    )
    when = {"started_at": "2026-01-01T00:00:00+00:00", "processor": "p", "versions": {"penstock": "0"}}
    work = {"model": str(tiny("llama")[0]), "threads": 1, "repeats": 1, "limits": low, "text_sha256": ""}
    report = CpuReport(**when, **work, rows=[row], memory=[], quality=[])
    assert judged(report, low.larger(high)).limit_faults == ()
    wrong = judged(report, low)
    assert wrong.rows[0].share_of_limit > 1
    assert len(wrong.limit_faults) == 1
    assert CpuReport.model_validate_json(wrong.model_dump_json()) == wrong
    show_cpu(wrong)
    shown = capsys.readouterr().out
    assert "limit wrong" in shown
    assert "FAULT reading, 16 tokens, penstock bfloat16" in shown
    assert f"{wrong.rows[0].share_of_limit:.0%} │" not in shown, "a share of more than everything"


def test_a_share_counts_attention_and_what_is_kept_of_a_context(tiny):
    def shares(part: str) -> list[float | None]:
        whats = ("16 tokens", "1600 tokens")
        rows = [Row(part=part, what=what, who="penstock bfloat16", tokens_per_s=1, samples=[1]) for what in whats]
        when = {"started_at": "2026-01-01T00:00:00+00:00", "processor": "p", "versions": {"penstock": "0"}}
        work = {"model": str(tiny("llama")[0]), "threads": 1, "repeats": 1, "limits": limits, "text_sha256": ""}
        return [
            row.share_of_limit
            for row in judged(CpuReport(**when, **work, rows=rows, memory=[], quality=[]), limits).rows
        ]

    limits = DeviceLimits(product_gflops=1, read_gb_per_s=1)
    for part in ("reading", "writing"):
        short, long = shares(part)
        assert 0 < short < long < 1


def test_a_step_reads_codes_where_matrices_are_kept_as_codes(tiny):
    folder = str(tiny("llama")[0])
    files, limits = resolve(folder), DeviceLimits(product_gflops=1, read_gb_per_s=1e-9)
    spec, quantization = decoder_spec(files.config), quantization_of(files, "int8")
    with Engine.load(folder, dtype="bfloat16", quantize="int8", context=100, memory="4GiB", threads=1) as engine:
        kept_bytes = engine.model.memory.shape.weight_bytes
    looked_up = matrix_bytes(Type.Q8_0, spec.vocab_size, spec.hidden_size)  # a row of it for each token
    assert least_step_s(spec, [0], limits, quantization) == kept_bytes - looked_up
    assert least_step_s(spec, [0], limits) > 1.5 * (kept_bytes - looked_up)
