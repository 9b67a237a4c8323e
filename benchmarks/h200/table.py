"""Prints last.json beside the reference figures of vLLM 0.24.0 on the same card and the same work, as a table."""

import json
from pathlib import Path

# Measured with FlashAttention 3 on one H200; seconds. Penstock was not run beside it in the same run yet.
VLLM = {
    "prefill_2048": 0.0484,
    "prefill_8192": 0.209,
    "prefill_32768": 1.236,
    "prefill_131072": 11.061,
    "tpot_1_1024": 0.00522,
    "tpot_8_1024": 0.00576,
    "tpot_64_1024": 0.00817,
    "tpot_256_1024": 0.0198,
    "tpot_8_32768": 0.0148,
}
VLLM_MIXED = {8192: (3.55, 0.656), 2048: (3.77, 0.190), 512: (4.50, 0.0487)}  # by tokens per step: TTFT, p99 gap
TARGETS = (600, 185, 47)  # ms; what Penstock is told, beside each of the three
VLLM_OFFLINE = 32_200.0  # tokens/s


def main() -> None:
    last = json.loads((Path(__file__).parent / "last.json").read_text())
    result = last["result"]
    print(f"commit {last['commit']}, {result['device']}")
    print("work                        penstock        vllm   vllm / penstock")
    for key, theirs in VLLM.items():
        print(f"{key:<22} {result[key] * 1e3:>10.2f} ms {theirs * 1e3:>8.2f} ms {theirs / result[key]:>12.2f}")
    for target, (ttft, gap) in zip(TARGETS, VLLM_MIXED.values(), strict=True):
        mixed = result[f"mixed_at_{target}_ms"]
        name = f"target {target} ms"
        print(f"{name}: TTFT {mixed['ttft']:>13.2f} s {ttft:>9.2f} s {ttft / mixed['ttft']:>12.2f}")
        print(f"{name}: p99 gap {mixed['itl_p99'] * 1e3:>9.1f} ms {gap * 1e3:>8.1f} ms {gap / mixed['itl_p99']:>12.2f}")
    ours = result["offline"]["tok_s"]
    print(f"offline {ours:>21,.0f} tok/s {VLLM_OFFLINE:>6,.0f} tok/s {ours / VLLM_OFFLINE:>9.2f} (ours / theirs)")


if __name__ == "__main__":
    main()
