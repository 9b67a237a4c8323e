"""Takes the pictures of the page that the documentation shows: both themes, and a phone.

Needs Debian's chromium and playwright. Run it from the repository: .venv/bin/python scripts/page_screenshots.py
"""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from server_process import serving  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
DOCUMENT = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs" / "concepts").glob("*.md")))[:7_000]
STREAMS = ["Write a long story about a river.", "Explain how a turbine works, in detail.", "List many kinds of boats."]


def chat(url: str, content: str, max_tokens: int) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


def prepared(page: Page, url: str) -> None:
    """A long prompt that is being read beside running streams."""
    page.goto(url)
    page.wait_for_selector("#state.live")
    page.fill("#document", DOCUMENT)
    page.fill("#question", "What does Penstock do with a long prompt?")
    page.fill("#max", "60")


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with (
        serving("--memory", "2GiB", "--latency-target-ms", "400", is_fresh=True) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        asking = [threading.Thread(target=chat, args=(server.url, text, 80)) for text in STREAMS]
        page = browser.new_page(viewport={"width": 1180, "height": 830}, color_scheme="dark")
        prepared(page, server.url)
        for thread in asking:
            thread.start()
        page.wait_for_timeout(1500)
        page.click("#send")
        page.wait_for_function(
            "() => Number(document.querySelector('#progress').getAttribute('aria-valuenow')) >= 50", timeout=180_000
        )
        page.screenshot(path=PICTURES / "page-dark.png")
        page.wait_for_function("() => document.querySelector('#stats').textContent.includes('wrote')", timeout=180_000)
        page.click("#theme")
        page.click("#send")
        page.wait_for_function("() => document.querySelector('#answer').textContent.length > 60", timeout=180_000)
        page.screenshot(path=PICTURES / "page-light.png")
        phone = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="light", device_scale_factor=2)
        prepared(phone, server.url)
        phone.wait_for_timeout(500)
        phone.screenshot(path=PICTURES / "page-phone.png")
        for thread in asking:
            thread.join()
        browser.close()


if __name__ == "__main__":
    main()
