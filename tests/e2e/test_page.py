"""The page in a real browser: ask, watch chunks, stop, resume, open a trace, with the keyboard and on a phone."""

import json
import shutil

import pytest
from hang_bound import HANG_S, within
from scripted_model import call, playing
from server_process import serving
from tiny_chat_model import save_tiny_chat_model

from penstock.trace.document import Trace

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
playwright_api = pytest.importorskip("playwright.sync_api")

DOCUMENT = "The gate was opened and the turbine turned. " * 250


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Chunks of 8 tokens: a document of 2,500 tokens is read for a while."""
    folder = tmp_path_factory.mktemp("page")
    save_tiny_chat_model(folder)
    with serving(str(folder), "--chunk-size", "8", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """A fresh page; whatever it writes to its console as an error fails the test."""
    page = browser.new_page()
    page.set_default_timeout(HANG_S * 1000)
    mistakes = []
    page.on("console", lambda message: mistakes.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: mistakes.append(str(error)))
    page.on("request", lambda request: mistakes.append(request.url) if server.url not in request.url else None)
    page.goto(server.url)
    page.wait_for_selector("#state.live")
    yield page
    page.close()
    # The browser itself notes every refused request; the page shows it.
    assert [m for m in mistakes if not m.startswith(("data:", "blob:")) and "status of 413" not in m] == []


def says(page, selector, word):
    page.wait_for_function(
        "([selector, word]) => document.querySelector(selector).textContent.includes(word)", arg=[selector, word]
    )
    return page.text_content(selector)


def described(page):
    return page.get_attribute("#canvas", "aria-label")


def test_asking_stopping_and_asking_again(page):
    page.fill("#document", DOCUMENT)
    page.fill("#max", "400")  # it still writes where reading ends before the click
    page.click("#send")
    says(page, "#stats", "tokens read")
    page.wait_for_function("() => Number(document.querySelector('#progress').getAttribute('aria-valuenow')) >= 5")
    page.wait_for_function("() => /[1-9][0-9]* prompt chunks/.test(document.querySelector('#canvas').ariaLabel)")
    page.click("#stop")
    says(page, "#stats", "stopped")
    page.wait_for_function("() => document.querySelector('#canvas').ariaLabel.includes('cancelled')")
    page.fill("#max", "8")
    page.click("#send")
    stats = says(page, "#stats", "wrote 8")
    assert "from the cache" in stats
    assert "first token after" in stats
    assert page.text_content("#answer")
    page.wait_for_function("() => document.querySelector('#canvas').ariaLabel.includes('2 requests in view')")
    assert page.is_disabled("#stop")
    assert "MB" in page.text_content("#memory")
    assert says(page, "#running", "0 running")


def test_the_gauges_say_something_before_the_first_request(browser, tmp_path):
    save_tiny_chat_model(tmp_path)
    with serving(str(tmp_path), "--dtype", "float32", "--latency-target-ms", "900", "--memory", "2GB") as fresh:
        page = browser.new_page()
        page.goto(fresh.url)
        page.wait_for_selector("#state.live")
        assert says(page, "#step-of", "target") == "target 900 ms"
        assert says(page, "#memory-of", "budget") == "of weights, budget 2.00 GB"
        assert "–" not in page.text_content(".gauges")
        page.close()


def test_the_target_is_held_against_steps_with_answers_alone(browser, tmp_path):
    save_tiny_chat_model(tmp_path)
    with serving(str(tmp_path), "--dtype", "float32", "--latency-target-ms", "900") as late:
        page = browser.new_page()
        page.goto(late.url)
        page.wait_for_selector("#state.live")
        page.fill("#document", DOCUMENT[:400])
        page.fill("#max", "3")
        page.click("#send")
        page.wait_for_function("() => trace.steps.some(step => step.chunks.some(chunk => chunk.kind === 'decode'))")
        for kind, of in (("prefill", "target 900 ms with answers"), ("decode", "target 900 ms")):
            step = "trace.steps.find(step => step.chunks.every(chunk => chunk.kind === kind))"
            page.evaluate(f"kind => gauges({{...{step}, elapsed_ms: 5000}})", kind)
            assert page.text_content("#step-of") == of
            assert page.evaluate("$('step-bar').classList.contains('over')") == (kind == "decode")
        page.close()


def test_nobody_is_asked_before_the_page_knows_the_model(browser, server):
    held = []
    page = browser.new_page()
    page.route("**/timeline", lambda route: held.append(route))
    page.goto(server.url)
    assert within(HANG_S, lambda: page.evaluate("1") and held)
    assert page.is_disabled("#send")
    assert page.text_content("#state") == "connecting"
    held[0].continue_()
    page.wait_for_selector("#state.live")
    assert page.is_enabled("#send")
    page.close()


def test_a_refusal_is_shown(page):
    page.fill("#document", "word " * 6000)
    page.click("#send")
    assert "4096" in says(page, "#stats", "tokens")
    assert page.get_attribute("#stats", "class") == "bad"


def test_thoughts_and_calls_are_shown_apart_from_the_text(browser, tmp_path):
    written = "<think>Where is it?</think>I look.\n" + call("weather", city="Paris") + call("weather", city="<b>")
    with playing(tmp_path, [written, "Mild."], "--reasoning-parser", "think") as thinking:
        page = browser.new_page()
        page.set_default_timeout(HANG_S * 1000)
        page.goto(thinking.url)
        page.wait_for_selector("#state.live")
        page.click("summary")
        page.fill("#tools", "[")
        page.click("#send")
        says(page, "#stats", "The tools are no JSON")
        function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
        page.fill("#tools", json.dumps([{"type": "function", "function": function}]))
        page.click("#send")
        says(page, "#stats", "wrote")
        assert page.text_content("#thinking") == "Where is it?"
        assert page.text_content("#answer") == "I look."
        assert page.locator(".call").all_text_contents() == ['weather{"city": "Paris"}', 'weather{"city": "<b>"}']
        page.fill("#tools", "")
        page.click("#send")
        says(page, "#answer", "Mild.")
        assert page.is_hidden("#thoughts")
        assert page.locator(".call").count() == 0
        page.close()


def test_a_saved_trace_opens_on_the_same_page(page, tmp_path):
    page.select_option("#kind", "text")
    page.fill("#question", "The water runs")
    page.fill("#max", "3")
    page.press("#question", "Enter")
    says(page, "#stats", "wrote 3")
    with page.expect_download() as download:
        page.click("#save")
    path = tmp_path / "trace.json"
    download.value.save_as(path)
    assert Trace.read(path).requests[-1].written_tokens == 3
    page.set_input_files("#open", path)
    assert says(page, "#state", "saved trace")
    assert "prompt chunks" in described(page)
    assert page.evaluate("trace.requests.at(-1).written_tokens") == 3
    (tmp_path / "other.json").write_text("hello")
    page.set_input_files("#open", tmp_path / "other.json")
    assert says(page, "#state", "cannot be opened")
    (tmp_path / "old.json").write_text('{"format": "penstock-trace", "version": 1}')
    page.set_input_files("#open", tmp_path / "old.json")
    assert says(page, "#state", "of version 1")
    page.click("#live")
    page.wait_for_selector("#state.live")


def test_the_timeline_is_reachable_by_keyboard(page):
    page.focus("#canvas")
    page.keyboard.press(" ")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press(" ")
    assert page.get_attribute("#pause", "aria-pressed") == "false"
    names = page.evaluate(
        "[...document.querySelectorAll('button:not([hidden]), input:not([hidden]), textarea, select')]"
        ".filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map((e) => e.id)"
    )
    assert names == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_both_themes_fit_a_phone(browser, server, scheme):
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    page.set_default_timeout(HANG_S * 1000)
    page.goto(server.url)
    page.wait_for_selector("#state.live")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") != scheme
    page.close()
