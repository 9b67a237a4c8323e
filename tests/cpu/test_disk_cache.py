"""Keys and values in a cache folder: what another process finds gives the same tokens, and all else is a miss."""

import dataclasses
import os
import random
import resource
import shutil

import pytest
import torch
from image_answers import SETTINGS, finished
from logit_recorder import LogitRecorder
from tiny_models import LATER, RECURRENT, prompt

from penstock.cache.prefix import root_hash
from penstock.engine.engine import Engine
from penstock.errors import InvalidSetting
from penstock.request import Finished

TEXT = prompt(700)
SAMPLING = {"max_tokens": 12, "ignore_eos": True}
USUAL = ["llama", "qwen2-mixed-windows", "qwen3-next", "bamba"]
OTHERS = sorted(({"gemma3", "mixtral", "olmo3", "exaone4", "cohere2"} & LATER) | (RECURRENT - {*USUAL}))
FAMILIES = [*USUAL, *(pytest.param(name, marks=pytest.mark.evidence) for name in OTHERS)]


@pytest.fixture
def ask(tiny, tmp_path):
    """Asks an engine of its own, which stands for a process, and closes it."""

    def make(tokens=TEXT, name="llama", *, folder=tmp_path / "cache", submit=None, **settings):
        kept = {} if folder is None else {"cache_dir": str(folder)}
        model = name if os.path.isdir(name) else str(tiny(name)[0])
        with Engine.load(model, **SETTINGS | kept | settings) as engine:
            output = engine.generate(tokens, **SAMPLING | (submit or {}))
        assert not folder or engine.disk is None or engine.scheduler.pool.num_held == 0
        return output

    return make


def slabs(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.kv"))


@pytest.mark.parametrize("name", FAMILIES)
def test_another_process_reads_only_what_is_new_and_writes_the_same(name, ask, load, tmp_path):
    longer = [*TEXT, *prompt(90, seed=9)]
    alone, cold = ask(longer, name, folder=None, chunk_size=128), ask(TEXT, name, chunk_size=128)
    assert cold.hits.num_tokens == 0
    warm = ask(longer, name, chunk_size=128)
    assert warm.token_ids == alone.token_ids
    assert warm.hits.disk >= 512
    assert warm.chunks[0].start == warm.hits.disk
    assert ask(TEXT, name, chunk_size=128).token_ids == cold.token_ids


def kept_rows(engine, num_tokens):
    """Keys and values of the first tokens of the text, as the prefix cache finds them."""
    holdings = engine.scheduler.holdings
    known = holdings.prefix.known(TEXT, root_hash(holdings.model_identity, "default"), 16)[: num_tokens // 16]
    slots = [16 * holdings.prefix._block_by_hash[one] + place for one in known for place in range(16)]
    assert len(slots) == num_tokens
    storage = engine.model.storage
    return [rows[slots].clone() for rows in (*storage.keys, *storage.values)]


@pytest.mark.parametrize("name", ["llama", "qwen3-next"])
def test_what_comes_from_disk_is_bit_for_bit_what_memory_held(name, load, tmp_path):
    folder = {"cache_dir": str(tmp_path / "cache"), "chunk_size": 128}
    engine, tail = load(name, **folder), [*TEXT[:688], *prompt(40, seed=3)]
    engine.generate(TEXT, **SAMPLING)
    in_memory, rows = LogitRecorder(engine), kept_rows(engine, 512)
    hit = engine.generate(tail, **SAMPLING)
    engine.close()
    other = load(name, **folder)
    on_disk = LogitRecorder(other)
    loaded = other.generate(tail, **SAMPLING)
    assert loaded.hits.disk == (512 if name == "llama" else 720)
    assert all(map(torch.equal, rows, kept_rows(other, 512)))
    assert loaded.token_ids == hit.token_ids
    assert (in_memory.all - on_disk.all).abs().max() < 1e-5  # blocks beside each other are added up in one go


def test_a_damaged_folder_gives_the_same_tokens(ask, tmp_path):
    expected, drawn = ask().token_ids, random.Random(4)
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "cache", whole)
    for round in range(6):
        path = drawn.choice(slabs(tmp_path))
        data = bytearray(path.read_bytes())
        if round % 2:
            data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
        else:
            del data[drawn.randrange(len(data)) :]
        path.write_bytes(data)
        damaged = ask()
        assert damaged.token_ids == expected
        assert damaged.hits.disk < 512
        assert ask().hits.disk == 512, "what was damaged is stored again"


def test_one_changed_byte_of_the_weights_another_scope_type_or_kernel_finds_nothing(ask, tiny, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny("llama")[0], model)
    ask(name=str(model))
    assert ask(name=str(model)).hits.disk == 512, "the control"
    assert ask(name=str(model), submit={"scope": "another key"}).hits.disk == 0
    assert ask(name=str(model), dtype="bfloat16", cpu_kernels="torch").hits.disk == 0
    assert ask(name=str(model), dtype="bfloat16", cpu_kernels="torch").hits.disk == 512, "its control"
    assert ask(name=str(model), dtype="bfloat16", block_size=32).hits.disk == 0
    weights = next(model.glob("*.safetensors"))
    before, data = weights.stat(), bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert ask(name=str(model)).hits.disk == 0
    assert ask(name=str(model)).hits.disk == 512, "its control"


def test_a_folder_that_is_full_or_cannot_be_written_fails_no_request(ask, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # every write past that fails, as on a full disk
    try:
        full = ask()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.token_ids == ask(folder=None).token_ids
    assert not slabs(tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))
    ask()
    (tmp_path / "cache" / "kv" / "lock").unlink()
    (tmp_path / "cache" / "kv" / "lock").mkdir()  # nobody can write here now, whoever it is
    assert ask().hits.disk == 512
    with pytest.raises(InvalidSetting, match="cannot be used"):
        ask(folder=tmp_path / "cache" / "kv" / "secret")


def test_requests_beside_each_other_wait_for_one_load_and_may_leave_meanwhile(ask, load, tmp_path):
    expected = ask().token_ids
    engine = load(cache_dir=str(tmp_path / "cache"))
    leaving = engine.submit(TEXT, **SAMPLING)
    engine.step()
    ids = [engine.submit(TEXT, **SAMPLING) for _ in range(3)]
    engine.abort(leaving)
    outputs = finished(engine, ids)
    assert {output.token_ids for output in outputs} == {expected}
    assert engine.scheduler.moves.use.loaded_tokens == 512


def test_a_small_pool_lends_its_blocks_to_moves_and_gets_them_back(tiny, tmp_path):
    prompts = [prompt(300, seed=seed) for seed in range(4)]
    outputs = []
    for folder in ({}, *[{"cache_dir": str(tmp_path / "cache")}] * 2):
        engine = Engine.load(str(tiny("llama")[0]), **SETTINGS | folder | {"context": 400, "max_running": 2})
        ids = [engine.submit(tokens, **SAMPLING) for tokens in prompts * 2]
        outputs.append([output.token_ids for output in finished(engine, ids)])
        engine.close()
    assert outputs[0] == outputs[1] == outputs[2]


def test_what_has_no_part_in_the_folder_says_so(load, tiny, tmp_path):
    folder = {"cache_dir": str(tmp_path / "cache")}
    assert any("prefix_cache is off" in told for told in load(prefix_cache=False, **folder).adjustments)
    with pytest.raises(InvalidSetting, match="prefix_cache is off"):
        load(prefix_cache=False, strict=True, **folder)
    with pytest.raises(InvalidSetting, match="Give --cache-dir"):
        load(cache_disk="1GiB")
    engine = load(**folder)
    nameless = Engine(dataclasses.replace(engine.model, content=None))
    assert nameless.disk is None
    assert any("come from no files" in told for told in nameless.adjustments)


def test_steps_tell_of_their_moves(load, tmp_path):
    engine = load(cache_dir=str(tmp_path / "cache"))
    moved = []
    engine.on_step = lambda plan, result: moved.extend(result.moved)
    engine.generate(TEXT, **SAMPLING)
    engine.close()
    engine = load(cache_dir=str(tmp_path / "cache"))
    engine.on_step = lambda plan, result: moved.extend(result.moved)
    request = engine.submit(TEXT, **SAMPLING)
    assert any(isinstance(event, Finished) for event in request.events())
    loads = [one for one in moved if one.move.kind == "load"]
    assert sum(len(one.move.slab.tokens) for one in loads) == 512
    assert all(one.is_done and one.num_bytes > 0 for one in loads)
