"""What the doctor makes of machines that are not this one: every finding that is not good has a way out."""

import dataclasses

import pytest
from pydantic import ValidationError

from penstock.doctor.advice import latency_target_ms, nearly_fastest
from penstock.doctor.diagnosis import Diagnosis, Severity, refused
from penstock.doctor.machine import MachineFacts, Need, diagnose_machine
from penstock.errors import MemoryTooSmall
from penstock.plan.devices import DeviceMemory
from penstock.plan.machine import MachineMemory
from penstock.schedule.budget import StepCost

GIB = 2**30
TORCH = Need(asked="torch>=2.11,<2.14", installed="2.13.0+cpu", is_met=True)
GPU = DeviceMemory(total_bytes=140 * GIB, free_bytes=139 * GIB, name="NVIDIA H200", capability=(9, 0))
OLDER_GPU = dataclasses.replace(GPU, name="NVIDIA A10", capability=(8, 6))
MEMORY = MachineMemory(total_bytes=32 * GIB, available_bytes=30 * GIB, swap_bytes=0, swap_used_bytes=0)
HEALTHY = MachineFacts(
    python="3.11.7",
    needs=(TORCH,),
    extras={"fastapi": "1", "PIL": "11"},
    torch_is_cpu_build=True,
    triton=None,
    flashinfer=None,
    processor="a processor",
    flags=frozenset({"avx2", "avx512f", "avx512_bf16", "amx_tile"}),
    num_cores=8,
    num_threads=8,
    load=0.3,
    memory=MEMORY,
    has_driver=False,
    gpu=None,
    torch_uses_gpu=False,
)


def test_a_healthy_machine_has_nothing_to_mend():
    found = diagnose_machine(HEALTHY)
    assert {diagnosis.status for diagnosis in found} == {Severity.GOOD}
    shown = " ".join(diagnosis.finding for diagnosis in found)
    assert all(
        word in shown for word in ("Python 3.11.7", "torch 2.13.0", "AVX-512", "bfloat16", "AMX", "32.2 of 34.4 GB")
    )


def test_kernels_for_it_are_as_good_as_bfloat16_instructions():
    facts = dataclasses.replace(HEALTHY, flags=frozenset({"avx2", "fma", "f16c"}))
    assert {diagnosis.status for diagnosis in diagnose_machine(facts)} == {Severity.GOOD}


@pytest.mark.parametrize(
    ("changes", "topic", "status", "found", "remedy"),
    [
        ({"needs": (dataclasses.replace(TORCH, installed="2.9", is_met=False),)}, "packages", "problem", "2.9", "pip"),
        ({"extras": {"fastapi": None}}, "packages", "note", "fastapi", "penstock[serve]"),
        ({"num_threads": 64}, "threads", "problem", "64 threads on 8", "--threads 8"),
        ({"num_threads": 2}, "threads", "note", "2 of 8", "--threads 8"),
        ({"load": 7.0}, "load", "note", "7.0 processes share 8", "quiet"),
        (
            {"flags": frozenset({"avx2"})},
            "processor",
            "note",
            "no bfloat16",
            "smaller",
        ),  # without FMA there are no kernels
        ({"has_driver": True}, "GPU", "problem", "build for CPUs", "CUDA"),
        ({"has_driver": True, "torch_is_cpu_build": False}, "GPU", "problem", "gives no GPU", "nvidia-smi"),
        (
            {"gpu": GPU, "has_driver": True},
            "GPU",
            "problem",
            "NVIDIA H200, but torch cannot use it",
            "Update the driver",
        ),
        ({"gpu": GPU, "torch_uses_gpu": True}, "attention", "problem", "Triton is not there", "pip install triton"),
        (
            {"gpu": GPU, "torch_uses_gpu": True, "triton": "3.6"},
            *("attention", "note", "FlashInfer", "penstock[cuda]"),
        ),
        ({"memory": dataclasses.replace(MEMORY, available_bytes=GIB // 2)}, "memory", "problem", "0.5 of", "Close"),
        (
            {"memory": dataclasses.replace(MEMORY, swap_bytes=8 * GIB, swap_used_bytes=3 * GIB)},
            *("swap", "note", "3.2 of 8.6 GB", "Close"),
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_remedy(changes, topic, status, found, remedy):
    worse = [d for d in diagnose_machine(dataclasses.replace(HEALTHY, **changes)) if d.status is not Severity.GOOD]
    assert [(diagnosis.topic, diagnosis.status.value) for diagnosis in worse] == [(topic, status)]
    assert found in worse[0].finding
    assert remedy in worse[0].remedy


def test_a_gpu_with_everything_is_good():
    card = dataclasses.replace(HEALTHY, gpu=GPU, torch_uses_gpu=True, has_driver=True, triton="3.6", flashinfer="0.6")
    found = diagnose_machine(card)
    assert {diagnosis.status for diagnosis in found} == {Severity.GOOD}
    shown = {diagnosis.topic: diagnosis.finding for diagnosis in found}
    assert "NVIDIA H200, 149.3 of 150.3 GB" in shown["GPU"]
    assert "FlashInfer 0.6" in shown["attention"]
    older = dataclasses.replace(card, gpu=OLDER_GPU, flashinfer=None)  # where it would not be used, it is not missed
    assert {diagnosis.topic: diagnosis for diagnosis in diagnose_machine(older)}["attention"].status is Severity.GOOD


def test_an_error_is_told_with_its_way_out_apart():
    told = refused("budget", MemoryTooSmall("The budget is 0.1 GiB; it needs 0.6 (0.3 of it weights). Raise --memory."))
    assert told.finding == "The budget is 0.1 GiB; it needs 0.6 (0.3 of it weights)"
    assert told.remedy == "Raise --memory"
    assert refused("files", MemoryTooSmall("Too small.")).finding == "Too small"
    with pytest.raises(ValidationError):
        Diagnosis(topic="x", status=Severity.NOTE, finding="bad, and no way out")


def test_the_smallest_chunk_that_is_nearly_as_fast_is_recommended():
    assert nearly_fastest({16: 100, 64: 180, 256: 197, 1024: 200}) == 256
    assert nearly_fastest({16: 200, 64: 190}) == 16


def test_the_target_leaves_a_prompt_half_its_speed_beside_four_answers():
    # 10 ms a step, 1 ms a token, 10 us a token of an answer's context
    cost = StepCost((0.010, 0.001, 0.0, 0.00001, 0.0))
    assert latency_target_ms(cost, best_rate=900, context=100) == 100  # 64 tokens in 82 ms; 50 ms hold only 16
    assert latency_target_ms(cost, best_rate=10**9, context=100) is None
