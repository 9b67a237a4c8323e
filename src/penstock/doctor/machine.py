"""What the machine has, and what a long prompt would miss on it. No torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from packaging.requirements import Requirement

from penstock.config import GB, GIB, HOPPER, EngineConfig
from penstock.doctor.diagnosis import Diagnosis, good, note, problem
from penstock.kernels.build import INSTRUCTIONS
from penstock.plan.devices import DeviceMemory, cuda_memory
from penstock.plan.machine import MachineMemory, cpu_flags, machine_memory, num_physical_cores, processor_name
from penstock.trace.environment import installed

LEAST_AVAILABLE_BYTES = GIB
MUCH_SWAP_BYTES = GIB // 4
BUSY = 0.5  # of the cores, by others
EXTRAS = {"fastapi": "serve", "llguidance": "serve", "PIL": "images", "matplotlib": "plot"}
DISTRIBUTIONS = {"PIL": "pillow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A package that Penstock asks for."""

    asked: str  # as pip takes it
    installed: str | None  # None: not there
    is_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    python: str
    needs: tuple[Need, ...]
    extras: dict[str, str | None]  # version by package; None: not there
    torch_is_cpu_build: bool
    triton: str | None
    flashinfer: str | None
    processor: str
    flags: frozenset[str]
    num_cores: int
    num_threads: int
    load: float  # processes that wanted a core, over the last minute
    memory: MachineMemory
    has_driver: bool  # of an NVIDIA GPU
    gpu: DeviceMemory | None
    torch_uses_gpu: bool

    @classmethod
    def here(cls, config: EngineConfig, torch_uses_gpu: Callable[[], bool]) -> MachineFacts:
        """`torch_uses_gpu` is asked where the driver has a GPU: torch takes seconds to import."""
        num_cores = num_physical_cores()
        gpu = cuda_memory()
        return cls(
            python=platform.python_version(),
            needs=tuple(_needs()),
            extras={name: installed(DISTRIBUTIONS.get(name, name)) for name in EXTRAS},
            torch_is_cpu_build=(installed("torch") or "").endswith("+cpu"),
            triton=installed("triton"),
            flashinfer=installed("flashinfer-python"),
            processor=processor_name(),
            flags=cpu_flags(),
            num_cores=num_cores,
            num_threads=config.threads or num_cores,
            load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
            memory=machine_memory(),
            has_driver=_has_driver(),
            gpu=gpu,
            torch_uses_gpu=gpu is not None and torch_uses_gpu(),
        )


def diagnose_machine(facts: MachineFacts) -> list[Diagnosis]:
    return [
        _packages(facts),
        *_extras(facts),
        _threads(facts),
        *_load(facts),
        _processor(facts),
        _gpu(facts),
        *_gpu_backends(facts),
        _memory(facts),
        _swap(facts),
    ]


def _packages(facts: MachineFacts) -> Diagnosis:
    unmet = [need for need in facts.needs if not need.is_met]
    if unmet:
        found = ", ".join(f"{need.asked} (found {need.installed or 'none'})" for need in unmet)
        asked = " ".join(f'"{need.asked}"' for need in unmet)
        return problem("packages", f"Python {facts.python}; not met: {found}", f"pip install {asked}")
    versions = [need for need in facts.needs if need.asked.startswith(("torch", "transformers"))]
    named = ", ".join(f"{Requirement(need.asked).name} {need.installed}" for need in versions)
    return good("packages", f"Python {facts.python}, {named}; all {len(facts.needs)} needed packages are there")


def _extras(facts: MachineFacts) -> Iterator[Diagnosis]:
    missing = {EXTRAS[name]: name for name, version in facts.extras.items() if version is None}
    for extra, name in missing.items():
        yield note("packages", f"{name} is not there, which `{extra}` needs", f'pip install "penstock[{extra}]"')


def _threads(facts: MachineFacts) -> Diagnosis:
    cores = "1 core" if facts.num_cores == 1 else f"{facts.num_cores} cores"
    if facts.num_threads > facts.num_cores:
        finding = f"{facts.num_threads} threads on {cores}: they wait for each other at every product"
        return problem("threads", finding, f"Give --threads {facts.num_cores}, or leave it out")
    if facts.num_threads < facts.num_cores:
        finding = f"{facts.num_threads} of {cores} are used"
        return note("threads", finding, f"Give --threads {facts.num_cores}, or leave it out, if others need none")
    return good("threads", f"{facts.num_threads} on {cores}")


def _load(facts: MachineFacts) -> Iterator[Diagnosis]:
    if facts.load > BUSY * facts.num_cores:
        finding = f"{facts.load:.1f} processes share {facts.num_cores} cores: times below are longer than they would be"
        yield note("load", finding, "Ask again when the machine is quiet")


def _processor(facts: MachineFacts) -> Diagnosis:
    found = [
        name
        for name, flags in (
            ("AVX2", {"avx2"}),
            ("AVX-512", {"avx512f"}),
            ("bfloat16", {"avx512_bf16", "amx_bf16", "bf16"}),
            ("AMX", {"amx_tile"}),
            ("NEON", {"asimd"}),
        )
        if flags & facts.flags
    ]
    names = ", ".join(found) or "no vector instructions that are known"
    finding = f"{facts.processor}: {names}"
    if "bfloat16" not in found and not any(kernels.are_had(facts.flags) for kernels in INSTRUCTIONS):
        remedy = "Weights are held in float32, twice as large: take a smaller model, or --dtype bfloat16 to save memory"
        return note("processor", f"{finding}; no bfloat16 instructions", remedy)
    return good("processor", finding)


def _gpu(facts: MachineFacts) -> Diagnosis:
    if facts.gpu is not None and not facts.torch_uses_gpu:
        finding = f"the driver has a {facts.gpu.name}, but torch cannot use it; the CPU is used"
        return problem("GPU", finding, "Update the driver, or install a torch for its CUDA version (see pytorch.org)")
    if facts.gpu is not None:
        free, total = facts.gpu.free_bytes / GB, facts.gpu.total_bytes / GB
        return good("GPU", f"{facts.gpu.name}, {free:.1f} of {total:.1f} GB free")
    if facts.has_driver and facts.torch_is_cpu_build:
        finding = "a driver for one is there, but torch is a build for CPUs"
        return problem("GPU", finding, "Install torch from PyTorch's CUDA wheel index (see pytorch.org)")
    if facts.has_driver:
        return problem("GPU", "a driver is there, but it gives no GPU", "Run nvidia-smi, and mend what it says")
    return good("GPU", "none; the CPU is used")


def _gpu_backends(facts: MachineFacts) -> Iterator[Diagnosis]:
    if facts.gpu is None or not facts.torch_uses_gpu:
        return
    if facts.triton is None:
        yield problem("attention", "Triton is not there, which a GPU needs", "pip install triton")
    elif facts.gpu.capability != HOPPER:
        yield good("attention", f"our kernels in Triton {facts.triton}")
    elif facts.flashinfer is None:
        finding = f"our kernels in Triton {facts.triton}; FlashInfer, which reads wide chunks faster, is not there"
        yield note("attention", finding, 'pip install "penstock[cuda]"')
    else:
        finding = (
            f"our kernels in Triton {facts.triton}; FlashInfer {facts.flashinfer} for wide chunks, where it is faster"
        )
        yield good("attention", finding)


def _memory(facts: MachineFacts) -> Diagnosis:
    memory = facts.memory
    finding = f"{memory.available_bytes / GB:.1f} of {memory.total_bytes / GB:.1f} GB are free"
    if memory.available_bytes < LEAST_AVAILABLE_BYTES:
        return problem("memory", finding, "Close other programs, or raise the limit of the container")
    return good("memory", finding)


def _swap(facts: MachineFacts) -> Diagnosis:
    memory = facts.memory
    if memory.swap_used_bytes > MUCH_SWAP_BYTES:
        finding = f"{memory.swap_used_bytes / GB:.1f} of {memory.swap_bytes / GB:.1f} GB are in use"
        return note("swap", finding, "Close other programs: weights that are swapped out make every step slow")
    return good("swap", f"{memory.swap_bytes / GB:.1f} GB, unused" if memory.swap_bytes else "none")


def _needs() -> Iterator[Need]:
    for text in importlib.metadata.requires("penstock") or []:
        asked = Requirement(text)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        version = installed(asked.name)
        is_met = version is not None and asked.specifier.contains(version, prereleases=True)
        yield Need(asked=f"{asked.name}{asked.specifier}", installed=version, is_met=is_met)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
