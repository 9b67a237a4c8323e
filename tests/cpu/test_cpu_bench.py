"""How `penstock bench cpu` looks."""

from penstock.bench.cpu import CpuReport, Limits, MemoryRow, Row, default_settings, fastest_ways
from penstock.cli.cpu_table import show_cpu


def test_the_table_shows_ratios_to_the_best_of_the_others(capsys):
    speeds = {"penstock bfloat16": 300.0, "penstock packed": 150.0, "transformers bfloat16": 100.0}
    speeds |= {"transformers float32": 60.0, "llama.cpp q8_0": 120.0}
    rows = [
        Row(part="reading", what="64 tokens", who=who, tokens_per_s=speed, samples=[speed], share_of_limit=0.25)
        for who, speed in speeds.items()
    ]
    memory = [MemoryRow(who="penstock packed", base_bytes=300_000_000, peak_bytes=450_000_000)]
    limits = Limits(product_gflops=400, read_gb_per_s=40)
    show_cpu(
        CpuReport(model="m", threads=2, repeats=3, limits=limits, rows=rows, memory=memory, quality=[], text_sha256="")
    )
    lines = capsys.readouterr().out.splitlines()
    ours = next(line for line in lines if "penstock packed" in line and "reading" in line)
    assert [cell.strip() for cell in ours.strip("│").split("│")][3:] == ["150.0", "1.50", "1.25", "0.50", "25%"]
    assert any("450 MB, 150 of it beyond its libraries" in line for line in lines)
    assert default_settings(repeats=None).repeats == 3


def test_longer_prompts_are_given_to_the_fastest_way_of_each_program():
    speeds = {"penstock bfloat16": 300.0, "penstock packed": 350.0, "llama.cpp q8_0": 120.0, "llama.cpp bfloat16": 90.0}
    rows = [Row(part="writing", what="64 tokens", who=who, tokens_per_s=s, samples=[s]) for who, s in speeds.items()]
    assert fastest_ways(rows, {who: who.split()[0] for who in speeds}) == {"penstock packed", "llama.cpp q8_0"}
