"""The processes that `penstock bench cpu` asks, on a tiny model."""

import statistics

import pytest

from penstock.bench.cpu import CpuReport, Limits, MemoryRow, Row, default_settings
from penstock.bench.cpu_peers import own_peer
from penstock.cli.cpu_table import show_cpu
from penstock.errors import PenstockError


def test_a_peer_reads_and_writes_and_says_what_it_took(tiny):
    peer = own_peer("penstock", "ours", model=str(tiny("llama")[0]), threads=1, memory="1GiB")
    try:
        assert 0 < peer.ask("read", num_tokens=64, seed=1, chunk_size=16) < 60
        assert 0 < peer.ask("write", context=32, num_tokens=4, seed=2, num_streams=3) < 60
        losses = peer.ask("losses", text="w3 w4 w5 w6 w7 w8", num_tokens=6)
        assert len(losses) == 5
        assert statistics.mean(losses) > 0.1
        base, peak = peer.ask("memory")
        assert 0 < base <= peak
    finally:
        peer.close()


def test_a_peer_that_cannot_begin_is_said_so():
    with pytest.raises(PenstockError, match="ours ended with 1"):
        own_peer("penstock", "ours", model="/no/such/model")


def test_the_table_shows_ratios_to_the_best_of_the_others(capsys):
    speeds = {"penstock bfloat16": 300.0, "penstock packed": 150.0, "transformers bfloat16": 100.0}
    speeds |= {"transformers float32": 60.0, "llama.cpp q8_0": 120.0}
    rows = [
        Row(part="reading", what="64 tokens", who=who, tokens_per_s=speed, samples=[speed])
        for who, speed in speeds.items()
    ]
    memory = [MemoryRow(who="penstock packed", base_bytes=300_000_000, peak_bytes=450_000_000)]
    limits = Limits(product_gflops=400, read_gb_per_s=40)
    show_cpu(CpuReport(model="m", threads=2, repeats=3, limits=limits, rows=rows, memory=memory, quality=[]))
    lines = capsys.readouterr().out.splitlines()
    ours = next(line for line in lines if "penstock packed" in line and "reading" in line)
    assert [cell.strip() for cell in ours.strip("│").split("│")][3:] == ["150.0", "1.50", "1.25", "0.50"]
    assert any("450 MB, 150 of it beyond its libraries" in line for line in lines)
    assert default_settings(repeats=None).repeats == 3
