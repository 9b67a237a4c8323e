"""What is asked and what comes back: settings are checked once, and speeds are those of what was done."""

import pytest

from penstock.errors import InvalidSetting
from penstock.request import ChunkRecord, Hits, Output, Request, SamplingParams, SourceReading


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -1.0),
        ("temperature", 1e-5),
        ("top_k", 0),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 3.0),
        ("presence_penalty", -3.0),
        ("seed", -1),
        ("stop", ("",)),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("min_tokens", 300),
        ("logit_bias", ((5, 101.0),)),
    ],
)
def test_settings_out_of_range_are_refused_with_name_value_and_limit(name, value):
    with pytest.raises(InvalidSetting, match=rf"^{name} is .*; it must be "):
        SamplingParams(**{name: value})


def test_settings_are_taken_as_users_give_them():
    given = SamplingParams.of({"stop": "end", "logit_bias": {7: -2.0}})
    assert (given.stop, given.logit_bias) == (("end",), ((7, -2.0),))
    assert SamplingParams.of({"stop": None}).stop == ()
    assert SamplingParams.of({"stop": ["a", "b"]}).stop == ("a", "b")
    with pytest.raises(InvalidSetting, match=r"no sampling setting 'temprature'; known ones are .*temperature"):
        SamplingParams.of({"temprature": 1})


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"repetition_penalty": 1.1},
        {"min_tokens": 2},
        {"grammar": "{}"},
        {"logit_bias": ((1, 1.0),)},
    ],
)
def test_only_plain_greedy_answers_need_no_more_than_the_likeliest_token(values):
    assert SamplingParams().is_likeliest
    assert not SamplingParams(**values).is_likeliest


def test_what_is_made_of_every_token_takes_none_from_the_cache():
    assert SamplingParams(prompt_logprobs=0).needs_every_token
    assert SamplingParams(pooling="mean").needs_every_token
    assert not SamplingParams(pooling="last").needs_every_token


def test_positions_of_a_source_are_passes_over_it():
    plain = Request(id=0, prompt=(1, 2), sampling=SamplingParams(), arrived_at=0.0)
    source = SourceReading(num_tokens=10, num_passes=3)
    asked = Request(id=1, prompt=(1,), sampling=SamplingParams(), arrived_at=0.0, source=source)
    assert (plain.first_decoder_position, asked.first_decoder_position) == (0, 30)
    assert [plain.num_slots(5), plain.num_reached(5), plain.num_read(5)] == [5, 5, 5]
    assert [asked.num_slots(n) for n in (0, 5, 30, 34)] == [10, 10, 10, 14]
    assert [asked.num_reached(n) for n in (9, 10, 14)] == [0, 30, 34]
    assert [asked.num_read(n) for n in (0, 15, 30, 34)] == [0, 5, 10, 10]


def output(**values):
    plain = {"request_id": 0, "text": "", "token_ids": (1, 2, 3), "finish_reason": "length", "num_prompt_tokens": 30}
    plain |= {"num_computed_tokens": 30, "hits": Hits(recent=10), "ttft_s": 2.0, "prefill_s": 2.0, "decode_s": 4.0}
    chunks = tuple(ChunkRecord(start=start, end=start + 10, ms=1.0) for start in (10, 20, 30))
    return Output(**plain | {"chunks": chunks, "peak_bytes": 0, "predicted_peak_bytes": 0} | values)


def test_speeds_are_of_what_was_read_and_written():
    assert (output().prefill_tokens_per_s, output().decode_tokens_per_s, output().num_prompt_chunks) == (10, 0.5, 2)
    assert output(prefill_s=0.0).prefill_tokens_per_s == 0
    assert output(token_ids=(1,)).decode_tokens_per_s == 0
