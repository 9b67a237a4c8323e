"""What users of the engine rely on: streaming, many requests, cancellation, sampling, stops, probabilities."""

import dataclasses
import gc
import io
import json
import weakref

import pytest
import torch
from logit_recorder import LogitRecorder
from tiny_models import VOCABULARY, prompt, reference_logits, save_tiny_model

from penstock.engine.engine import Engine
from penstock.errors import InvalidPrompt, InvalidSetting, MemoryTooSmall, PromptTooLong, UnknownLane
from penstock.plan.pace import Pace
from penstock.prompt.source import TextPart
from penstock.request import Failed, Finished, PrefillProgress, SamplingParams, Token


def words(tokens):
    return " ".join(f"w{token}" for token in tokens)


def test_a_stream_tells_progress_then_tokens_then_the_end(load):
    engine = load(chunk_size=40)
    events = list(engine.stream(prompt(100), max_tokens=5, ignore_eos=True))
    kinds = [type(event) for event in events]
    assert kinds == [PrefillProgress] * 3 + [Token] * 5 + [Finished]
    assert [event.num_computed for event in events[:3]] == [40, 80, 100]
    assert all(event.num_total == 100 for event in events[:3])
    output = events[-1].output
    assert output.token_ids == tuple(event.token_id for event in events[3:-1])
    assert output.text == "".join(event.text for event in events[3:-1])
    assert output.finish_reason == "length"
    assert [(chunk.start, chunk.end) for chunk in output.chunks] == [(0, 40), (40, 80), (80, 100)]


def test_the_time_left_follows_from_what_the_chunks_took(load):
    engine = load(chunk_size=8)
    *events, end = engine.stream(prompt(300), max_tokens=1, ignore_eos=True)
    told = [event for event in events if isinstance(event, PrefillProgress)]
    pace = Pace(growth=engine.model.spec.attention_growth)
    for event, chunk in zip(told, end.output.chunks, strict=True):
        pace.note(chunk.start, chunk.end, chunk.ms / 1e3)
        assert event.eta_s == pytest.approx(pace.seconds_left(chunk.end, 300, event.elapsed_s))
    assert len(told) == 38
    assert told[-1].eta_s == 0


def test_a_text_a_list_of_ids_and_a_feed_are_the_same_prompt(load):
    engine = load(chunk_size=16, prefix_cache=False)
    tokens = prompt(50)
    from_ids = engine.generate(tokens, max_tokens=8, ignore_eos=True)
    from_text = engine.generate(words(tokens), max_tokens=8, ignore_eos=True)
    feed = engine.chat_feed([TextPart.of_text(words(tokens))])  # no template: read as it is
    from_feed = engine.generate(feed, max_tokens=8, ignore_eos=True)
    assert from_ids.token_ids == from_text.token_ids == from_feed.token_ids


def test_the_first_chunk_runs_before_the_end_of_the_text_has_been_read(load):
    engine = load(chunk_size=16, context=20_000)
    num_read = 0

    class Watched(io.RawIOBase):
        """A pipe that gives one word at a time."""

        def read(self, size=-1):
            nonlocal num_read
            num_read += 1
            return f"w{num_read % 100 + 50} ".encode() if num_read < 5000 else b""

    feed = engine.chat_feed([TextPart(stream=Watched(), name="watched")])
    events = engine.stream(feed, max_tokens=1)
    assert next(events).num_computed == 16
    assert num_read < 200
    events.close()


def test_cancelling_takes_effect_within_a_chunk_and_an_equal_prompt_resumes(load):
    engine = load(chunk_size=32)
    tokens = prompt(300)
    expected = load(chunk_size=0).generate(tokens, max_tokens=6, ignore_eos=True).token_ids
    for num_chunks in (1, 3, 5):
        engine.scheduler.prefix.clear()
        request_id = engine.submit(tokens, max_tokens=6, ignore_eos=True)
        events = engine.events(request_id)
        for _ in range(num_chunks):
            assert isinstance(next(events), PrefillProgress)
        engine.abort(request_id)
        *rest, last = list(events)
        assert rest == []
        assert isinstance(last, Finished)
        assert (last.output.finish_reason, last.output.num_computed_tokens) == ("abort", 32 * num_chunks)
        retry = engine.generate(tokens, max_tokens=6, ignore_eos=True)
        assert retry.num_cached_tokens == 32 * num_chunks
        assert retry.token_ids == expected


def test_closing_the_iterator_cancels_the_request(load):
    engine = load(chunk_size=32)
    events = engine.stream(prompt(300))
    next(events)
    events.close()
    assert not engine.scheduler.has_work


def test_a_closed_engine_that_is_still_named_gives_its_weights_back(load):
    engine = load()
    handle = engine.submit(prompt(20), max_tokens=2)
    output = engine.generate(prompt(30), max_tokens=2)
    lane = weakref.ref(engine.model.lane)
    engine.close()
    gc.collect()
    assert lane() is None, (engine, handle, output)


def test_steps_return_each_event_once_and_forget_what_ended(load):
    engine = load(chunk_size=16)
    ids = [engine.submit(prompt(40, seed=seed), max_tokens=3, ignore_eos=True) for seed in range(2)]
    cancelled = engine.submit(prompt(40), max_tokens=3)
    engine.abort(cancelled)
    events = []
    while engine.scheduler.has_work:
        events += engine.step()
    for request_id in ids:
        mine = [type(event) for event in events if event.request_id == request_id]
        assert mine[-4:] == [Token, Token, Token, Finished]
        assert mine.count(Token) == 3
    (end,) = [event for event in events if event.request_id == cancelled]
    assert end.output.finish_reason == "abort"
    assert not engine._active
    assert not engine._mailboxes


def test_a_batch_with_a_refused_prompt_leaves_nothing_behind(load):
    engine = load()
    with pytest.raises(InvalidPrompt):
        engine.generate_batch([prompt(20), []])
    assert not engine.scheduler.has_work


def test_a_stream_that_was_never_begun_leaves_nothing_behind(load):
    engine = load()
    engine.stream(prompt(20)).close()
    assert not engine.scheduler.has_work


def test_strict_refuses_before_any_step(load):
    refusing, adjusting = load(chunk_size=512, strict=True), load(chunk_size=512)
    for engine in (refusing, adjusting):
        tight = engine.model.memory.peak_bytes(chunk=32, context=900)
        engine.memory.budget_bytes = tight
    with pytest.raises(InvalidSetting, match="strict"):
        refusing.submit(prompt(900))
    assert len(adjusting.generate(prompt(900), max_tokens=1).chunks) > 2


def test_a_strict_refusal_within_a_step_ends_only_the_request_that_it_refuses(load):
    alone = load(chunk_size=512).generate(prompt(20), max_tokens=12, ignore_eos=True).token_ids
    engine = load(chunk_size=512, strict=True)
    answer = engine.submit(prompt(20), max_tokens=12, ignore_eos=True)
    engine.step()
    refused = engine.submit(prompt(900))
    engine.memory.budget_bytes = engine.model.memory.peak_bytes(chunk=32, context=900)
    events = []
    while engine.scheduler.has_work:
        events += engine.step()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.request_id == refused
    assert str(failed.error).startswith("--strict: the memory budget allows")
    outputs = {event.request_id: event.output for event in events if isinstance(event, Finished)}
    assert outputs[answer].token_ids == alone


def test_loading_again_measures_the_same_runtime(load):
    runtimes = []
    for _ in range(3):
        engine = load()
        runtimes.append(engine.model.memory.runtime_bytes)
        engine.generate(prompt(200), max_tokens=2)
        engine.close()
        engine.close()  # harmless
    assert max(runtimes) - min(runtimes) < 30e6


def test_streams_can_be_followed_side_by_side(load):
    engine = load(chunk_size=16)
    prompts = [prompt(80, seed=seed) for seed in range(3)]
    alone = [load(chunk_size=0).generate(tokens, max_tokens=10, ignore_eos=True).token_ids for tokens in prompts]
    streams = [engine.stream(tokens, max_tokens=10, ignore_eos=True) for tokens in prompts]
    outputs = {}
    while streams:
        for stream in list(streams):
            event = next(stream, None)
            if isinstance(event, Finished):
                outputs[event.request_id] = event.output.token_ids
            elif event is None:
                streams.remove(stream)
    assert [outputs[key] for key in sorted(outputs)] == alone


def test_a_pool_too_small_for_all_preempts_and_loses_nothing(load):
    prompts = [prompt(90, seed=seed) for seed in range(4)]
    alone = [load(chunk_size=0).generate(tokens, max_tokens=40, ignore_eos=True).token_ids for tokens in prompts]
    engine = load(chunk_size=32, context=140, max_running=1)
    engine.scheduler.limits = dataclasses.replace(engine.scheduler.limits, max_running=4)
    preempted = []
    engine.on_step = lambda plan, result: preempted.extend(plan.preempted)
    outputs = engine.generate_batch(prompts, max_tokens=40, ignore_eos=True)
    assert [output.token_ids for output in outputs] == alone
    assert preempted


def test_a_failed_step_is_repeated_from_where_it_stood(load):
    engine = load(chunk_size=32)
    tokens = prompt(100)
    expected = engine.generate(tokens, max_tokens=5, ignore_eos=True).token_ids
    engine.scheduler.prefix.clear()
    request_id = engine.submit(tokens, max_tokens=5, ignore_eos=True)
    lane = engine._runner.lane

    class FailsOnce:
        num_calls = 0

        def run(self, inputs):
            self.num_calls += 1
            if self.num_calls in (2, 5):
                raise OSError
            return lane.run(inputs)

    engine._runner.lane = FailsOnce()
    num_failures = 0
    events = []
    while engine.scheduler.has_work:
        try:
            events += engine.step()
        except OSError:
            num_failures += 1
    output = events[-1].output
    assert (num_failures, output.request_id) == (2, request_id)
    assert output.token_ids == expected


def test_logprobs_are_those_of_the_models_own_distribution(load, tiny):
    tokens = prompt(60)
    output = load(chunk_size=16).generate(tokens, max_tokens=4, ignore_eos=True, logprobs=3)
    logits = reference_logits(tiny("llama")[1], [*tokens, *output.token_ids])
    expected = logits.log_softmax(-1)[len(tokens) - 1 : -1]
    assert len(output.logprobs) == 4
    for row, token, logprob in zip(expected, output.token_ids, output.logprobs, strict=True):
        assert logprob.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(3)
        assert [t for t, _ in logprob.alternatives] == best.indices.tolist()
        assert [v for _, v in logprob.alternatives] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("settings", [{"chunk_size": 0}, {"chunk_size": 16}, {"chunk_size": 16, "overlap": 5}])
def test_prompt_logprobs_are_the_same_for_every_chunking(load, tiny, settings):
    tokens = prompt(70)
    engine = load(**settings)
    engine.generate(tokens, max_tokens=1)  # a prefix that must not be used
    output = engine.generate(tokens, max_tokens=1, prompt_logprobs=2)
    expected = reference_logits(tiny("llama")[1], tokens).log_softmax(-1)
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 70
    for position in range(1, 70):
        found = output.prompt_logprobs[position]
        assert found.token_id == tokens[position]
        assert found.logprob == pytest.approx(expected[position - 1, tokens[position]].item(), abs=1e-4)
        assert [t for t, _ in found.alternatives] == expected[position - 1].topk(2).indices.tolist()


def test_logits_are_computed_for_wanted_rows_only(load):
    engine = load(chunk_size=32)
    rows = []
    lane = engine._runner.lane

    class Counting:
        def run(self, inputs):
            rows.append(len(inputs.logit_rows))
            return lane.run(inputs)

    engine._runner.lane = Counting()
    engine.generate(prompt(100), max_tokens=3, ignore_eos=True)
    assert rows == [0, 0, 0, 1, 1, 1]


def test_a_seed_makes_sampling_repeatable_and_seeds_differ(load):
    engine = load()
    values = {"max_tokens": 20, "temperature": 1.5, "ignore_eos": True}
    first, again, other = (engine.generate(prompt(30), seed=seed, **values).token_ids for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_each_narrowing_reaches_the_greedy_answer(load, narrow):
    engine = load()
    greedy = engine.generate(prompt(30), max_tokens=12, ignore_eos=True).token_ids
    sampled = engine.generate(prompt(30), max_tokens=12, ignore_eos=True, seed=1, **({"temperature": 1.0} | narrow))
    assert sampled.token_ids == greedy


def test_penalties_change_what_repeats(load):
    engine = load()
    plain = engine.generate(prompt(30), max_tokens=60, ignore_eos=True).token_ids
    for penalty in ({"repetition_penalty": 5.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        changed = engine.generate(prompt(30), max_tokens=60, ignore_eos=True, **penalty).token_ids
        assert len(set(changed)) > len(set(plain))


def test_a_stop_string_ends_the_answer_before_itself(load):
    engine = load()
    plain = engine.generate(prompt(30), max_tokens=30, ignore_eos=True)
    # Words are joined by the decoder; any piece of the middle of the text can be a stop.
    middle = plain.text[len(plain.text) // 2 :][:5]
    stopped = engine.generate(prompt(30), max_tokens=30, ignore_eos=True, stop=middle)
    assert stopped.finish_reason == "stop"
    assert stopped.text == plain.text[: plain.text.index(middle)]


def test_the_end_token_ends_the_answer(load):
    engine = load()
    tokens = engine.generate(prompt(30), max_tokens=30, ignore_eos=True).token_ids
    object.__setattr__(engine.model, "eos_ids", frozenset({tokens[10]}))
    output = engine.generate(prompt(30), max_tokens=30)
    assert output.finish_reason == "stop"
    assert output.token_ids == tokens[: tokens.index(tokens[10]) + 1]


def test_an_answer_ends_at_the_context_limit(load):
    engine = load(context=64)
    output = engine.generate(prompt(60), max_tokens=100, ignore_eos=True)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 4


@pytest.mark.parametrize(
    ("bad_prompt", "error"),
    [
        ([], InvalidPrompt),
        ("", InvalidPrompt),
        ([5, VOCABULARY], InvalidPrompt),
        ([5, -1], InvalidPrompt),
        ([{"role": "user", "content": "x"}], InvalidPrompt),
        (prompt(1024), PromptTooLong),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(load, bad_prompt, error):
    engine = load()
    with pytest.raises(error):
        engine.generate(bad_prompt)
    assert not engine.scheduler.has_work


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"memory": "50MB"}, MemoryTooSmall),
        ({"lane": "nonsense"}, UnknownLane),
        ({"chunk_size": -3}, InvalidSetting),
        ({"chunk_size": 8, "overlap": 8}, InvalidSetting),
        ({"device": "cuda"}, InvalidSetting),
        ({"dtype": "float16"}, InvalidSetting),
    ],
)
def test_settings_that_cannot_hold_are_refused(load, settings, error):
    with pytest.raises(error):
        load(**settings)


@pytest.mark.parametrize(
    "sampling", [{"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"nonsense": 1}, {"stop": ""}]
)
def test_impossible_sampling_is_refused(load, sampling):
    with pytest.raises(InvalidSetting):
        load().generate(prompt(5), **sampling)


def test_sampling_can_be_given_at_once_and_not_in_two_ways(load):
    engine = load()
    values = {"max_tokens": 9, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    given = engine.generate(prompt(30), params=SamplingParams(**values))
    assert given.token_ids == engine.generate(prompt(30), **values).token_ids
    with pytest.raises(InvalidSetting, match="max_tokens is given beside params"):
        engine.generate(prompt(30), params=SamplingParams(), max_tokens=5)


def test_the_same_request_twice_gives_bitwise_the_same_logits(load):
    runs = []
    for _ in range(2):
        recorder = LogitRecorder(engine := load(chunk_size=24))
        engine.generate(prompt(100), max_tokens=8, ignore_eos=True)
        runs.append(recorder.all)
    assert torch.equal(*runs)


ASKS = (
    {"max_tokens": 12, "ignore_eos": True},
    {"max_tokens": 1, "ignore_eos": True},
    {"max_tokens": 20, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1},
    {"max_tokens": 9, "ignore_eos": True, "temperature": 0.9, "seed": 3},
    {"max_tokens": 15, "ignore_eos": True, "frequency_penalty": 0.7},
    {"max_tokens": 40, "ignore_eos": True},
)


def answers_of(engine, stop):
    """Of requests that come while others run; one has a stop string that nobody can foresee."""
    ids, outputs = [], {}
    asks = [*ASKS, {"max_tokens": 40, "ignore_eos": True, "stop": (stop,)} if stop else ASKS[-1]]
    for number, ask in enumerate(asks):
        ids.append(engine.submit(prompt(20 + 17 * number, seed=number % 6), **ask))
        for event in engine.step():
            if isinstance(event, Finished):
                outputs[event.request_id] = event.output
    while len(outputs) < len(ids):
        outputs |= {event.request_id: event.output for event in engine.step() if isinstance(event, Finished)}
    return [outputs[request_id] for request_id in ids]


def test_steps_planned_ahead_give_the_same_answers(load):
    """As on a GPU: a step is planned and launched before the tokens of the one before it are read."""
    plain = load(chunk_size=24, max_running=5)
    ahead = load(chunk_size=24, max_running=5)
    ahead.most_in_flight = 2
    stop = answers_of(plain, None)[-1].text.split()[20]
    expected, found = answers_of(plain, stop), answers_of(ahead, stop)
    assert expected[-1].finish_reason == "stop"
    assert not ahead.scheduler.has_work or ahead.step() == []
    ahead.scheduler.check()
    for one, other in zip(expected, found, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        if one.logprobs is not None:
            assert [p.token_id for p in one.logprobs] == [p.token_id for p in other.logprobs]
            assert len(one.prompt_logprobs) == len(other.prompt_logprobs)


def test_cancelling_ahead_waits_for_what_is_in_flight_and_an_equal_prompt_resumes(load):
    engine = load(chunk_size=32)
    engine.most_in_flight = 2
    tokens = prompt(300)
    expected = load(chunk_size=0).generate(tokens, max_tokens=6, ignore_eos=True).token_ids
    for num_steps in (1, 3, 5):
        engine.scheduler.prefix.clear()
        request_id = engine.submit(tokens, max_tokens=6, ignore_eos=True)
        for _ in range(num_steps):
            engine.step()
        engine.abort(request_id)
        assert not engine.scheduler.has_work
        retry = engine.generate(tokens, max_tokens=6, ignore_eos=True)
        assert retry.num_cached_tokens == 32 * (num_steps + 1)
        assert retry.token_ids == expected


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_where_it_shows(tmp_path):
    save_tiny_model("llama", tmp_path)
    path = tmp_path / "tokenizer.json"
    known = json.loads(path.read_text())
    known["model"]["vocab"]["beyond"] = VOCABULARY
    path.write_text(json.dumps(known))
    with Engine.load(str(tmp_path), dtype="float32", threads=1) as engine:
        assert engine.generate("w1 w2", max_tokens=1).token_ids
        for prompt_of_text in ("w1 beyond", engine.chat_feed([TextPart.of_text("w1 beyond")])):
            with pytest.raises(InvalidPrompt, match=f"gives token {VOCABULARY}; the model has {VOCABULARY}"):
                engine.generate(prompt_of_text, max_tokens=1)
