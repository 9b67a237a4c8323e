"""A step that the system refuses memory for is run again at half its size, and nothing is lost."""

import json
import subprocess
import sys

import pytest
from tiny_models import VOCABULARY, prompt, save_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engine.engine import Engine

SETTINGS = {"dtype": "float32", "threads": 1, "prefix_cache": False, "memory": "4GiB", "chunk_size": 2048}
PROMPT = prompt(3000)

# The limit is the system's own, so it needs a process of its own; a short prompt first makes threads and loads code.
READER = """
import json, re, resource, sys
from pathlib import Path
from penstock.engine.engine import Engine
from penstock.errors import PenstockError

folder, settings, tokens, spare_mb = json.load(sys.stdin)
with Engine.load(folder, **settings) as engine:
    engine.generate(tokens[:40], max_tokens=2, ignore_eos=True)
    sizes = []
    engine.on_step = lambda plan, result: sizes.append(plan.num_tokens)
    held = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + spare_mb * 2**20, resource.RLIM_INFINITY))
    try:
        answer = engine.generate(tokens, max_tokens=8, ignore_eos=True).token_ids
    except PenstockError as error:
        answer = str(error)
    print(json.dumps({"answer": answer, "sizes": sizes, "adjustments": engine.adjustments}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=16_384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    save_tokenizer(path)
    return str(path)


def read_with(folder, spare_mb, **settings):
    given = json.dumps([folder, SETTINGS | settings, PROMPT, spare_mb])
    done = subprocess.run([sys.executable, "-c", READER], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_chunks_are_halved_until_they_fit_and_the_answer_is_the_same(folder):
    with Engine.load(folder, **SETTINGS) as engine:
        expected = engine.generate(PROMPT, max_tokens=8, ignore_eos=True).token_ids
    found = read_with(folder, 150)
    assert found["answer"] == list(expected)
    largest = max(found["sizes"])
    assert largest in (1024, 512, 256)
    assert sum(size for size in found["sizes"] if size > 1) == len(PROMPT)
    assert found["adjustments"][-1].startswith(f"steps of at most {largest} tokens: one of {2 * largest} did not fit")


def test_a_chunk_size_that_is_strictly_asked_for_is_refused_instead(folder):
    found = read_with(folder, 150, strict=True)
    assert "--strict" in found["answer"]
