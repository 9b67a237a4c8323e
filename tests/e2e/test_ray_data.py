"""Documents of a Ray dataset are answered as a local engine answers them."""

from importlib.util import find_spec

import pytest

from penstock import Engine

pytestmark = [
    pytest.mark.evidence,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]
NUM_DOCUMENTS = 24
SAMPLING = {"max_tokens": 8}


@pytest.fixture
def cluster():
    import ray

    ray.init(num_cpus=4, object_store_memory=200_000_000, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_two_actors_give_the_answers_of_a_local_engine(cluster):
    from ray import data

    from penstock.ray import Reader

    documents = [f"Document {n}. " + "A fox and a dog met near a river. " * (n % 7) for n in range(NUM_DOCUMENTS)]
    documents[5] = "too long " * 3000
    rows = data.from_items([{"prompt": text, "number": n} for n, text in enumerate(documents)])
    asked = {"num_actors": 2, "sampling": SAMPLING, "memory": "700MB", "context": 1024}
    compute = data.ActorPoolStrategy(size=2)
    read = rows.map_batches(Reader, fn_constructor_kwargs=asked, compute=compute, batch_size=8, num_cpus=1)
    found = sorted(read.take_all(), key=lambda row: row["number"])
    with Engine.load("smollm2", memory="700MB", context=1024, threads=1) as engine:
        local = ["" if n == 5 else engine.generate(text, **SAMPLING).text for n, text in enumerate(documents)]
    assert [row["answer"] for row in found] == local
    assert "tokens" in found[5]["error"]
    assert {row["error"] for row in found if row["number"] != 5} == {""}
