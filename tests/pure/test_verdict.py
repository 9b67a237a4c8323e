"""What a self-check found is told, kept and believed only where it holds."""

import pytest
from lane_ids import GENERIC_TEXT

from penstock.errors import UnsupportedModel
from penstock.lanes.lane import LaneFacts
from penstock.proof.verdict import Finding, Verdict, Way, judged, load_verdict, save_verdict, verdict_key

FACTS = LaneFacts(id=GENERIC_TEXT, eligible=True, applied=False, reason="run by transformers")
GOOD = Finding(exact=True, max_difference=1e-6, reason="logits agree")


def verdict(way=Way.PACKED, **values):
    return Verdict(
        **{"exact": True, "max_difference": 1e-6, "reason": "logits agree", "way": way, "packing": GOOD} | values
    )


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_facts_follow_the_way_that_was_found():
    assert "not checked yet" in judged(FACTS, None, is_strict=True).reason
    packed, own = (judged(FACTS, verdict(way), is_strict=True) for way in (Way.PACKED, Way.OWN_CACHE))
    assert (packed.shares_prefixes, packed.chunk_mask_mode) == (True, "offset-causal")
    assert (own.shares_prefixes, own.chunk_mask_mode) == (False, "the model's own")
    tiles = judged(FACTS, verdict(Way.TILES), is_strict=False)
    assert tiles.reason.endswith("exact (tiles): logits agree")


def test_what_is_not_exact_is_read_whole_or_refused():
    found = verdict(exact=False, reason="logits differ by 0.3", picture=GOOD)
    facts = judged(FACTS, found, is_strict=False)
    assert facts.reads_whole
    assert "read whole (packed): logits differ by 0.3, logits agree" in facts.reason
    with pytest.raises(UnsupportedModel, match=r"--strict: .*logits differ by 0\.3"):
        judged(FACTS, found, is_strict=True)


def test_a_verdict_is_kept_under_a_key_of_all_that_it_depends_on(tmp_path):
    run = {"dtype": "float32", "lane": GENERIC_TEXT, "backend": "cpu"}
    key = verdict_key({"model_type": "gpt2"}, **run)
    assert key == verdict_key({"model_type": "gpt2"}, **run)
    assert key != verdict_key({"model_type": "gpt2"}, **run | {"dtype": "bfloat16"})
    assert key != verdict_key({"model_type": "gptj"}, **run)
    assert load_verdict(key) is None
    save_verdict(key, verdict())
    assert load_verdict(key) == verdict()
    (file,) = (tmp_path / "penstock" / "selfcheck").iterdir()
    file.write_text("{")
    assert load_verdict(key) is None


def test_a_cache_that_cannot_be_written_costs_nothing_but_the_check(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    save_verdict("key", verdict())
    assert load_verdict("key") is None
