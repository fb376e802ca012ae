"""The page of a recorded run in a browser: what it shows, what its controls do, and that it runs without a complaint."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench_documents import document, runs_of

pytest.importorskip("ejkernel_bench", reason="run: pip install --editable ./benchmarks")
from ejkernel_bench._document import parse_document, read_document
from ejkernel_bench.report import write_page

HOSTILE = "<img src=x onerror=\"document.title='changed'\"></script>"


def recorded() -> dict[str, Any]:
    """Three operations; paged attention is lost to torch, softmax has no products, and every kind of missing result occurs."""
    times = {"xla": 1.0, "jax.nn": 1.6, "torch": 1.3}
    operations = ("flash_attention", "paged_attention", "softmax")
    lost = lambda operation, name: 0.5 if (operation, name) == ("paged_attention", "torch") else times[name]
    found = document(operations=operations, times=lost, noise=0.01)
    runs_of(found, "torch")[0].update(status="refused", reason=HOSTILE, wall_s=None)
    runs_of(found, "xla")[-1].update(status="wrong", reason="error 3.0", wall_s=None, error={"out": {"norm": None}})
    for case in found["cases"][:2]:
        run = copy.deepcopy(case["runs"][1])
        case["runs"].append({**run, "name": "triton", "kind": "ours", "chosen": False})
    for case in found["cases"][-6:]:
        case["flops"] = 0.0  # as where data is only moved
    found["commit"] = HOSTILE
    return found


@pytest.fixture
def page(browser, tmp_path):
    """The page, freshly loaded. Afterwards the console holds nothing."""
    path = write_page(parse_document(recorded()), tmp_path / "page.html")
    browser.get_log("browser")
    browser.get(path.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    assert browser.title.startswith("ejkernel benchmarks")


def all_of(page, selector: str) -> list[Any]:
    return page.find_elements("css selector", selector)


def texts(page, selector: str) -> list[str]:
    return page.execute_script("return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)", selector)


def column(page, name: str) -> list[str]:
    return texts(page, f"td[data-column='{name}']")


def choose(page, identifier: str, value: str) -> None:
    page.find_element("css selector", f"#{identifier} option[value='{value}']").click()


def metric(page, name: str) -> None:
    page.find_element("css selector", f"label:has(#metric-{name})").click()


def label_of(page, run: str, place: int = 0) -> str:
    return all_of(page, f".mark[data-run='{run}']")[place].get_attribute("aria-label")


def test_first_view(page):
    summary = page.find_element("id", "summary").text
    assert summary.startswith("18 cases: 11 faster than the best peer, 0 even, 6 losses, 1 without a result of ours.")
    assert texts(page, "figure h2") == ["flash_attention", "paged_attention", "softmax"]
    assert len(all_of(page, ".mark")) == 18 * 3 - 2 + 2
    assert len(all_of(page, "tbody tr")) == 18 * 3 + 2
    assert len(all_of(page, "tr.is-loss")) == 7
    assert column(page, "status").count("wrong: error 3.0") == 1
    assert f"refused: {HOSTILE}" in column(page, "status")
    assert HOSTILE in texts(page, "#provenance dd")
    assert all_of(page, "img") == []
    first = recorded()["cases"][0]["runs"][0]["wall_s"]
    assert label_of(page, "xla").startswith(f"xla, flash_attention T512 float32 forward: {sorted(first)[7] * 1e6:.0f} µs")


def test_legend_hides_and_shows_a_run(page):
    button = page.find_element("css selector", "#legend button[data-run='torch']")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert all_of(page, ".mark[data-run='torch']") == []
    assert "torch" not in column(page, "run")
    assert "3 of 4 runs" in page.find_element("id", "shown").text
    button.click()
    assert len(all_of(page, ".mark[data-run='torch']")) == 17


def test_metrics(page):
    found = recorded()["cases"][0]
    seconds = sorted(found["runs"][0]["wall_s"])[7]
    other = sorted(found["runs"][1]["wall_s"])[7]
    rates = {
        "flops": found["flops"] / seconds / 1e9,  # the fastest is below 1 TFLOP/s
        "gbs": found["bytes"] / seconds / 1e9,
        "fraction": found["limit_s"] / seconds,
        "ratio": 1.0,
    }
    for name, expected in rates.items():
        metric(page, name)
        number = re.search(r": ([\d.]+)", label_of(page, "xla"))[1]
        assert float(number) == pytest.approx(expected, rel=0.01)
    assert label_of(page, "jax.nn").endswith(f": {other / seconds:.2f}\u00d7")
    assert "GFLOP/s" in texts(page, "th")
    metric(page, "time")
    assert label_of(page, "xla").endswith("µs, 1.60\u00d7")


def test_filters(page):
    choose(page, "operation", "paged_attention")
    choose(page, "phase", "backward")
    assert texts(page, "figure h2") == ["paged_attention"]
    assert len(all_of(page, "tbody tr")) == 9
    assert set(column(page, "phase")) == {"backward"}
    choose(page, "operation", "")
    choose(page, "phase", "")
    page.find_element("id", "losses").click()
    assert "7 of 18 cases" in page.find_element("id", "shown").text
    assert texts(page, "figure h2") == ["paged_attention", "softmax"]
    choose(page, "operation", "flash_attention")
    assert all_of(page, "figure") == []


def test_sorting(page):
    heading = page.find_element("css selector", "th[data-column='flops']")
    heading.find_element("tag name", "button").click()
    values = [float(text) if text else None for text in column(page, "flops")]
    numbers = [value for value in values if value is not None]
    assert len(numbers) == 54
    assert numbers == sorted(numbers)
    assert values[54:] == [None, None]
    assert heading.get_attribute("aria-sort") == "ascending"
    heading.find_element("tag name", "button").click()
    assert [float(text) for text in column(page, "flops")[:54]] == numbers[::-1]
    assert column(page, "flops")[54:] == ["", ""]
    page.find_element("css selector", "th[data-column='case'] button").click()
    assert list(dict.fromkeys(column(page, "case"))) == ["T512", "T2048", "T8192"]
    assert len(all_of(page, "th[aria-sort]")) == 1


def test_keyboard(page):
    """One stop for each figure; arrows go from mark to mark and show its numbers, Escape hides them."""
    from selenium.webdriver.common.keys import Keys

    assert len(all_of(page, ".mark[tabindex='0']")) == 3
    page.execute_script("document.querySelector('.mark[tabindex=\"0\"]').focus()")
    tip = page.find_element("id", "tip")
    seen = [tip.find_element("tag name", "strong").text]
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT):
        page.switch_to.active_element.send_keys(key)
        seen.append(tip.find_element("tag name", "strong").text)
    assert seen[0] == seen[3] == "xla"
    assert seen[1] in ("jax.nn", "triton")
    assert "flash_attention T512, float32, backward" in tip.text
    assert "15, wall clock" in tip.text
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()


def test_hover(page):
    mark = all_of(page, ".mark[data-run='xla']")[0]
    page.execute_script("arguments[0].dispatchEvent(new PointerEvent('pointerenter'))", mark)
    tip = page.find_element("id", "tip")
    assert tip.is_displayed()
    assert "block_q=128, block_k=256" in tip.text
    box = tip.rect
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 1200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone(page, scheme):
    """Nothing but the table is wider than the screen, in either scheme, and text keeps its contrast."""
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.refresh()
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360
    colours = page.execute_script(
        "return arguments[0].map((s) => getComputedStyle(document.querySelector(s))).map((s) => [s.color, s.backgroundColor])",
        ["body", "#summary", ".hint", "tr.is-loss td.loss"],
    )
    page_colour = colours[0][1]
    for colour, own in colours:
        background = page_colour if own == "rgba(0, 0, 0, 0)" else own
        assert contrast(colour, background) >= 4.5
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


OUT_OF_PLACE = """
const found = [], slack = 0.5, box = new Map();
const name = (node) => `${node.getAttribute("class") ?? node.tagName} ${node.textContent}`;
const within = (a, b) => Math.min(a.left - b.left, b.right - a.right, a.top - b.top, b.bottom - a.bottom) >= -slack;
const apart = (a, b) => Math.max(b.left - a.right, a.left - b.right, b.top - a.bottom, a.top - b.bottom) >= -slack;
for (const chart of document.querySelectorAll("figure svg")) {
  const of = (selector) => [...chart.querySelectorAll(selector)];
  const texts = of("text"), marks = of(".mark line, .mark path, .limit, .bridge");
  for (const node of [chart, ...texts, ...marks]) box.set(node, node.getBoundingClientRect());
  for (const node of [...texts, ...marks]) {
    if (!within(box.get(node), box.get(chart))) found.push(`outside: ${name(node)}`);
    for (const text of texts) {
      if (text !== node && !apart(box.get(node), box.get(text))) found.push(`over a text: ${name(node)} and ${name(text)}`);
    }
  }
}
return found;
"""
"""What the charts draw outside of their frame, or over a text."""


def uneven() -> dict[str, Any]:
    """Runs whose quartiles lie far from their medians, limits far from times, and names as long as they come."""
    found = document(operations=("flash_attention", "paged_attention"), noise=0.3)
    for factor, run in zip((1e-4, 3e-2, 30, 1e3), runs_of(found, "jax.nn"), strict=False):
        run["wall_s"] = sorted(run["wall_s"])[:8] + [factor * seconds for seconds in run["wall_s"][8:]]
    found["cases"][0]["case"] = "grouped-query-causal-sliding-window-packed-sequences-T65536"
    found["cases"][1].update(limit_s=found["cases"][1]["limit_s"] * 1e-3, dtype="bfloat16")
    return found


@pytest.fixture(params=[(1280, 900), (390, 844)], ids=["desk", "phone"])
def sized(browser, request):
    """A screen of this size, light and dark by turns of the test."""
    width, height = request.param
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_or_covered(sized, tmp_path, scheme):
    """Whiskers, marks and texts lie inside their chart, whatever the metric, and the page does not scroll sideways."""
    sized.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    sized.get(write_page(parse_document(uneven()), tmp_path / "page.html").as_uri())
    for name in ("time", "flops", "gbs", "fraction", "ratio"):
        metric(sized, name)
        assert sized.execute_script(OUT_OF_PLACE) == [], name
        assert sized.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    page_colour, *colours = sized.execute_script(
        """
        const mark = document.querySelector(".mark path"), colours = [getComputedStyle(document.body).backgroundColor];
        for (let run = 0; run < 8; run++) {
          mark.setAttribute("fill", `var(--run-${run})`);
          colours.push(getComputedStyle(mark).fill);
        }
        return colours;
        """
    )
    assert len({*colours}) == 8
    assert min(contrast(colour, page_colour) for colour in colours) >= 3


def test_names_of_cases_are_whole(sized, tmp_path):
    """Every case of the record of an H200 can be told from the others."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    sized.get(write_page(read_document(results / "bench_h200.json"), tmp_path / "page.html").as_uri())
    assert len(texts(sized, "figure svg text")) > 100
    assert [text for text in texts(sized, "figure svg text") if "…" in text] == []


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2 between two colours `rgb(r, g, b)`."""

    def luminance(colour: str) -> float:
        parts = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_run_without_cases(browser, tmp_path):
    path = write_page(parse_document(json.loads(json.dumps(document(operations=())))), tmp_path / "empty.html")
    browser.get(path.as_uri())
    assert browser.find_element("id", "summary").text.startswith("0 cases")
    assert browser.get_log("browser") == []


def test_large_rates_are_in_tflops(browser, tmp_path):
    found = document(operations=("softmax",), lengths=(512,), noise=0.01)
    for case in found["cases"]:
        case["flops"] *= 1e4
    browser.get(write_page(parse_document(found), tmp_path / "large.html").as_uri())
    assert "TFLOP/s" in texts(browser, "th")
    seconds = sorted(found["cases"][0]["runs"][0]["wall_s"])[7]
    assert float(column(browser, "flops")[0]) == pytest.approx(found["cases"][0]["flops"] / seconds / 1e12, rel=0.01)
