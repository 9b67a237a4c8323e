"""Many tasks, one step loop: cancellation, back-pressure, shutdown."""

import asyncio
import threading

import pytest
from hang_bound import HANG_S, LEAST_BOUND_S, finished, until, within
from tiny_models import prompt
from tiny_vision_models import TEXT, pictures

from penstock.engine import async_engine
from penstock.engine.async_engine import MAX_UNREAD, AsyncEngine
from penstock.errors import EngineClosed, InvalidPrompt
from penstock.prompt.source import TextPart
from penstock.request import Finished, PrefillProgress, Token


def stepping(engine):
    """Set by the first step of the engine."""
    has_begun = threading.Event()
    engine.on_step = lambda plan, result: has_begun.set()
    return has_begun


def test_many_tasks_get_what_each_gets_alone(load):
    prompts = [prompt(40 + seed, seed=seed) for seed in range(8)]
    alone = [load(chunk_size=0).generate(tokens, max_tokens=10, ignore_eos=True).token_ids for tokens in prompts]

    async def scenario():
        engine = AsyncEngine(load(chunk_size=16))
        outputs = await asyncio.gather(*(engine.generate(p, max_tokens=10, ignore_eos=True) for p in prompts))
        await engine.close()
        return [output.token_ids for output in outputs]

    assert finished(scenario()) == alone


def test_a_stream_gives_progress_tokens_and_the_end(load):
    async def scenario():
        engine = AsyncEngine(load(chunk_size=16))
        kinds = [type(event) async for event in engine.stream(prompt(40), max_tokens=3, ignore_eos=True)]
        await engine.close()
        return kinds

    assert finished(scenario()) == [PrefillProgress] * 3 + [Token] * 3 + [Finished]


@pytest.mark.parametrize("way", ["leave", "cancel"])
def test_leaving_or_cancelling_ends_the_request_and_frees_its_blocks(load, way):
    async def scenario():
        engine = AsyncEngine(inner := load(chunk_size=8))

        async def follow(num_events):
            stream = engine.stream(prompt(200), max_tokens=100, ignore_eos=True)
            async for _ in stream:
                num_events -= 1
                if num_events == 0 and way == "leave":
                    break
            await stream.aclose()

        has_begun = stepping(inner)
        task = asyncio.create_task(follow(3))
        if way == "cancel":
            await until(has_begun.is_set)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not inner.scheduler.has_work)
        held = await engine.call(lambda e: (e.scheduler.pool.num_held, dict(e._active)))
        await engine.close()
        return held

    assert finished(scenario()) == (0, {})


@pytest.mark.parametrize("num_turns", range(6))
def test_a_cancellation_that_comes_together_with_an_event_is_not_forgotten(load, num_turns):
    async def scenario():
        engine = AsyncEngine(load(chunk_size=16))
        follower = engine.follower()
        waiting = asyncio.create_task(follower.next(HANG_S))
        await asyncio.sleep(0)  # it begins to wait
        follower.hear(Token(request_id=0, token_id=1, text="a"), 0.0)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_done = waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await engine.close()
        return was_done, waiting.cancelled()

    was_done, was_cancelled = finished(scenario())
    assert was_cancelled is not was_done


def test_a_slow_reader_rests_and_does_not_stop_the_others(load):
    async def scenario():
        engine = AsyncEngine(inner := load(chunk_size=16, context=4000))
        slow = engine.stream(prompt(20), max_tokens=MAX_UNREAD + 300, ignore_eos=True)
        await anext(slow)
        quick = await engine.generate(prompt(30, seed=2), max_tokens=MAX_UNREAD + 100, ignore_eos=True)
        (sequence,) = inner.scheduler.sequences.values()
        num_while_resting = sequence.num_generated
        was_paused = sequence.is_paused
        rest = [event async for event in slow]
        await engine.close()
        return quick, num_while_resting, was_paused, rest

    quick, num_while_resting, was_paused, rest = finished(scenario())
    assert len(quick.token_ids) == MAX_UNREAD + 100
    assert was_paused
    assert num_while_resting <= MAX_UNREAD + 2
    assert len(rest[-1].output.token_ids) == MAX_UNREAD + 300


def test_one_bad_prompt_fails_alone(load):
    async def scenario():
        engine = AsyncEngine(inner := load(chunk_size=16))
        with pytest.raises(InvalidPrompt):
            await engine.generate([])

        class Broken:
            def __init__(self):
                self.parts = [b"w5 " * 30, b"\xff"]

            def read(self, size=-1):
                return self.parts.pop(0) if self.parts else b""

        feed = inner.chat_feed([TextPart(stream=Broken(), name="broken")])
        good = asyncio.create_task(engine.generate(prompt(60), max_tokens=20, ignore_eos=True))
        with pytest.raises(InvalidPrompt, match="UTF-8"):
            await engine.generate(feed)
        output = await good
        await engine.close()
        return output

    assert len(finished(scenario()).token_ids) == 20


def test_closing_finishes_what_runs_and_refuses_what_comes(load):
    async def scenario():
        has_begun = stepping(inner := load(chunk_size=16))
        engine = AsyncEngine(inner)
        running = asyncio.create_task(engine.generate(prompt(60), max_tokens=50, ignore_eos=True))
        await until(has_begun.is_set)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed):
            await engine.generate(prompt(5))
        await closing
        with pytest.raises(EngineClosed):
            await engine.generate(prompt(5))
        return await running

    assert len(finished(scenario()).token_ids) == 50


def test_closing_without_draining_ends_what_runs(load):
    async def scenario():
        has_begun = stepping(inner := load(chunk_size=16))
        engine = AsyncEngine(inner)
        running = asyncio.create_task(engine.generate(prompt(60), max_tokens=900, ignore_eos=True))
        await until(has_begun.is_set)
        await engine.close(drain=False)
        return await running

    output = finished(scenario())
    assert output.finish_reason == "abort"
    assert len(output.token_ids) < 900


def test_a_reader_whose_event_loop_was_closed_takes_nobody_with_it(load):
    inner = load(chunk_size=16)
    is_in_step, may_go_on = threading.Event(), threading.Event()
    inner.on_plan = lambda plan: (is_in_step.set(), may_go_on.wait(HANG_S))

    async def leave():
        engine = AsyncEngine(inner)
        left = asyncio.create_task(engine.generate(prompt(60), max_tokens=900, ignore_eos=True))
        await asyncio.to_thread(is_in_step.wait)
        assert not left.done()
        return engine

    async def come(engine):
        output = await engine.generate(prompt(5), max_tokens=2, ignore_eos=True)
        held = await engine.call(lambda e: (e.scheduler.pool.num_held, dict(e._active)))
        await engine.close()
        return len(output.token_ids), held

    engine = finished(leave())
    may_go_on.set()
    assert finished(come(engine)) == (2, (0, {}))


def test_a_request_at_rest_is_ended_when_the_event_loop_of_its_reader_is_closed(load):
    engine = AsyncEngine(load(chunk_size=16, context=4000))
    loop = asyncio.new_event_loop()
    stream = engine.stream(prompt(20), max_tokens=3000, ignore_eos=True)
    loop.run_until_complete(at_rest(engine, stream))
    loop.close()  # nobody cancels the stream
    finished(engine.close())
    assert not engine.engine.scheduler.has_work


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_waits_is_told_when_the_step_thread_ends_by_an_error(load):
    inner = load(chunk_size=16)

    def end_the_thread(plan, result):
        raise SystemExit("of a watcher")

    async def scenario():
        engine = AsyncEngine(inner)
        inner.on_step = end_the_thread
        for _ in range(2):
            with pytest.raises(EngineClosed, match=r"broken down: .*of a watcher"):
                await engine.generate(prompt(5), max_tokens=2)
        with pytest.raises(EngineClosed, match="broken down"):
            await engine.call(lambda e: e.lane)
        await engine.close()

    finished(scenario())


def test_closing_without_draining_ends_requests_whose_readers_rest(load):
    async def scenario():
        engine = AsyncEngine(load(chunk_size=16, context=4000))
        stream = engine.stream(prompt(20), max_tokens=3000, ignore_eos=True)
        await at_rest(engine, stream)
        await engine.close(drain=False)
        return [event async for event in stream]

    assert finished(scenario())[-1].output.finish_reason == "abort"


def test_closing_finishes_requests_whose_readers_rest_once_they_read_on(load):
    async def scenario():
        engine = AsyncEngine(load(chunk_size=16, context=4000))
        stream = engine.stream(prompt(20), max_tokens=MAX_UNREAD + 300, ignore_eos=True)
        await at_rest(engine, stream)
        closing = asyncio.create_task(engine.close())
        events = [event async for event in stream]
        await closing
        return events

    assert len(finished(scenario())[-1].output.token_ids) == MAX_UNREAD + 300


def test_a_deadline_ends_a_request_at_rest_when_nothing_else_runs(load):
    async def scenario():
        engine = AsyncEngine(inner := load(chunk_size=16, context=4000))
        stream = engine.stream(prompt(20), max_tokens=3000, ignore_eos=True, deadline_s=2.0)
        await at_rest(engine, stream)
        await until(lambda: not inner.scheduler.has_work)
        num_held = inner.scheduler.pool.num_held
        events = [event async for event in stream]
        await engine.close()
        return num_held, events[-1].output.finish_reason

    assert finished(scenario()) == (0, "deadline")


async def at_rest(engine, stream):
    """Its reader takes one event and no more, until the request rests."""
    await anext(stream)
    await until(lambda: all(sequence.is_paused for sequence in list(engine.engine.scheduler.sequences.values())))


def test_steps_go_on_while_the_pictures_of_another_are_scaled(load_vision):
    """A processor that takes as long as ten steps of somebody else, who would wait for it in the step thread."""
    inner = load_vision("llava", chunk_size=7)
    scaled, num_steps, went_on = inner.model.lane.processor.processor, [0], []

    def slowly(**given):
        before = num_steps[0]
        went_on.append(within(LEAST_BOUND_S, lambda: num_steps[0] > before + 10))
        return scaled(**given)

    def count_step(plan, result):
        num_steps[0] += 1

    async def scenario():
        engine = AsyncEngine(inner)
        other = asyncio.create_task(engine.generate(prompt(20), max_tokens=100_000, ignore_eos=True))
        await until(lambda: num_steps[0])
        output = await engine.generate(TEXT, images=pictures(2), max_tokens=4, ignore_eos=True)
        assert not other.done()
        await engine.close(drain=False)
        await asyncio.gather(other, return_exceptions=True)
        return output.token_ids

    expected = inner.generate(TEXT, images=pictures(2), max_tokens=4, ignore_eos=True).token_ids
    inner.model.lane.processor.processor, inner.on_step = slowly, count_step
    assert finished(scenario()) == expected
    assert went_on == [True]


def test_forgotten_prefixes_hold_no_memory(load):
    engine = load(chunk_size=16, context=4096)
    pages = [*engine.model.storage.keys, *engine.model.storage.values]
    engine.generate(prompt(1000), max_tokens=1)
    assert all(values.any() for values in pages)
    engine.forget_prefixes()
    assert not any(values.any() for values in pages)


def test_an_engine_at_rest_gives_back_what_is_free_and_reads_as_before(load, monkeypatch):
    monkeypatch.setattr(async_engine, "IDLE_S", 0.01)
    inner = load(chunk_size=16, prefix_cache=False)
    storage = inner.model.storage
    pages = [*storage.keys, *storage.values]
    for values in pages:
        values.fill_(1)

    async def scenario():
        engine = AsyncEngine(inner)
        asked = {"max_tokens": 10, "ignore_eos": True}
        outputs = [await engine.generate(prompt(100), **asked)]
        await until(lambda: not any(values.any() for values in pages))
        outputs.append(await engine.generate(prompt(100), **asked))
        await engine.close()
        return outputs

    first, second = finished(scenario())
    assert second.token_ids == first.token_ids
