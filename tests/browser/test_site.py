"""The documentation site in a browser: its search, on a desk and on a phone."""

from __future__ import annotations

import functools
import http.server
import re
import threading
import time

import pytest


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def until(found, seconds: float = 15):
    """What a function finds, which it may take a while to."""
    end = time.monotonic() + seconds
    while not (result := found()) and time.monotonic() < end:
        time.sleep(0.1)
    return result


def found(browser, address, words: str) -> list[str]:
    """Pages and anchors that the search finds, the best first."""
    browser.set_window_size(1200, 900)
    browser.get(f"{address}/index.html")
    browser.find_element("css selector", ".md-search__button").click()
    inside = (
        "return [...document.querySelectorAll('*')].map((one) => one.shadowRoot).find((root) => root?.querySelector('input'))"
    )
    root = until(lambda: browser.execute_script(inside))
    assert root, "no search field"
    root.find_element("css selector", "input").send_keys(words)
    results = until(lambda: [one.get_attribute("href") for one in root.find_elements("css selector", "[role=listbox] a")])
    return [re.sub(r"\?[^#]*", "", result.removeprefix(f"{address}/")) for result in results]


def test_search_finds_a_function(browser, address):
    assert "reference/attention.html" in {result.partition("#")[0] for result in found(browser, address, "flash_attn_varlen")}


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("EJKERNEL_LOG", "environment.html#ejkernel_log"),
        ("speculative", "words.html#speculative-decoding"),
        ("GQA", "words.html#grouped-query-attention-gqa"),
        ("softmax", "operations/attention.html"),
    ],
)
def test_search_finds_what_explains_first(browser, address, words, first):
    """And notes on what was measured after it."""
    results = found(browser, address, words)
    assert results[0].removesuffix("#__skip") == first
    assert not any(result.startswith("evidence/") for result in results[:3])


def test_the_last_columns_fit_on_a_desk(browser, address):
    browser.set_window_size(1280, 900)
    for page in ("index", "evidence/losses", "measurements/index", "benchmarks"):
        browser.get(f"{address}/{page}.html")
        cut = browser.execute_script(
            "return [...document.querySelectorAll('.md-typeset table')].filter((one) => {"
            "  const around = one.closest('.md-typeset__scrollwrap') ?? one; return around.scrollWidth > around.clientWidth; })"
            ".map((one) => one.textContent.slice(0, 40))"
        )
        assert cut == [], page


def test_measurements_are_filtered(browser, address):
    """By device and phase; headings and records go with what they belong to."""
    browser.set_window_size(1280, 900)
    browser.get(f"{address}/measurements/linear_recurrence.html")
    shown = lambda selector: browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].filter((one) => one.offsetParent).map((one) => one.textContent)",
        selector,
    )
    assert len(shown("article h2")) == 3
    everything = len(shown(".measurement"))
    choose = (
        "const one = document.querySelector(`select[name=${arguments[0]}]`);"
        "one.value = arguments[1]; one.dispatchEvent(new Event('change'))"
    )
    browser.execute_script(choose, "device", "NVIDIA H200")
    assert [heading.startswith("NVIDIA H200") for heading in shown("article h2")] == [True]
    assert all("h200.json" in code for code in shown("article > p > a"))
    browser.execute_script(choose, "phase", "forward")
    assert 0 < len(shown(".measurement")) < everything
    for name in ("device", "phase"):
        browser.execute_script(choose, name, "")
    assert len(shown(".measurement")) == everything


@pytest.mark.parametrize(
    "page", ["index", "measurements/flash_attention", "reference/attention", "operations/attention", "evidence/benchmarks_cpu"]
)
def test_a_phone_shows_a_page_without_scrolling_sideways(browser, address, page):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    )
    try:
        browser.get(f"{address}/{page}.html")
        widths = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert widths == [390, 390]
        assert browser.find_element("css selector", "h1").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_console_holds_nothing(browser, address):
    browser.get_log("browser")
    browser.get(f"{address}/reference/attention.html")
    assert until(lambda: browser.execute_script("return document.readyState") == "complete")
    assert browser.get_log("browser") == []
