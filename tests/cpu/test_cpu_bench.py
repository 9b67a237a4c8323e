"""How `penstock bench cpu` looks."""

from penstock.bench.cpu import CpuReport, Limits, MemoryRow, Row, Work, _in_turns, default_settings, fastest_ways
from penstock.cli.cpu_table import show_cpu


def test_the_table_shows_ratios_to_the_best_of_the_others(capsys):
    speeds = {"penstock bfloat16": 300.0, "penstock packed": 150.0, "transformers bfloat16": 100.0}
    speeds |= {"transformers float32": 60.0, "llama.cpp q8_0": 120.0}
    rows = [
        Row(part="reading", what="64 tokens", who=who, tokens_per_s=speed, samples=[speed], share_of_limit=0.25)
        for who, speed in speeds.items()
    ]
    memory = [MemoryRow(who="penstock packed", num_tokens=64, base_bytes=300_000_000, peak_bytes=450_000_000)]
    limits = Limits(product_gflops=400, read_gb_per_s=40)
    when = {"started_at": "2026-01-01T00:00:00+00:00", "processor": "p", "versions": {"penstock": "0"}}
    work = {"model": "m", "threads": 2, "repeats": 3, "limits": limits, "text_sha256": ""}
    show_cpu(CpuReport(**when, **work, rows=rows, memory=memory, quality=[]))
    lines = capsys.readouterr().out.splitlines()
    ours = next(line for line in lines if "penstock packed" in line and "reading" in line)
    assert [cell.strip() for cell in ours.strip("│").split("│")][3:] == ["150.0", "1.50", "1.25", "0.50", "25%"]
    assert any("450 MB, 150 of it beyond its libraries" in line for line in lines)
    assert default_settings(repeats=None).repeats == 3


def test_longer_prompts_are_given_to_the_fastest_way_of_each_program():
    speeds = {"penstock bfloat16": 300.0, "penstock packed": 350.0, "llama.cpp q8_0": 120.0, "llama.cpp bfloat16": 90.0}
    rows = [Row(part="writing", what="64 tokens", who=who, tokens_per_s=s, samples=[s]) for who, s in speeds.items()]
    assert fastest_ways(rows, {who: who.split()[0] for who in speeds}) == {"penstock packed", "llama.cpp q8_0"}


def test_works_take_turns_and_their_medians_count():
    order: list[str] = []

    def work(who: str, seconds: list[float]) -> Work:
        def run(seed: int) -> float:
            order.append(f"{who}{seed}")
            return seconds[seed]

        return Work(what="8 tokens", who=who, num_tokens=8, run=run)

    settings = default_settings(repeats=2, say=lambda line: None)
    rows = _in_turns(settings, "streams", [work("a", [1, 2, 4, 8]), work("b", [8, 8, 4, 1])], rounds=2)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]
    assert [(row.who, row.tokens_per_s, row.samples) for row in rows] == [
        ("a", 3.0, [8.0, 4.0, 2.0, 1.0]),
        ("b", 1.5, [1.0, 1.0, 2.0, 8.0]),
    ]
