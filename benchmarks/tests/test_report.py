"""The page and the pictures of a recorded run."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import subprocess
import sys

import pytest
from bench_documents import document, runs_of

from ejkernel_bench._document import parse_document
from ejkernel_bench._units import seconds_text
from ejkernel_bench.report import page_html, write, write_page, write_plots, write_section
from ejkernel_bench.report._canvas import log_ticks
from ejkernel_bench.report._content import content
from ejkernel_bench.report.section import commands

HOSTILE = '</script><script>alert("x")</script>&<!--'


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_page_holds_the_numbers():
    found = document(noise=0.005)
    shown = data_of(page_html(parse_document(found)))
    assert [run["name"] for run in shown["runs"]] == ["xla", "jax.nn", "torch"]
    assert len(shown["cases"]) == 18
    first = shown["cases"][0]
    ours, _, torch = first["runs"]
    assert (first["standing"], first["limit_s"]) == ("loss", found["cases"][0]["limit_s"])
    assert ours["time"] == sorted(found["cases"][0]["runs"][0]["wall_s"])[7]
    assert ours["low"] < ours["time"] < ours["high"]
    assert (ours["speaks"], ours["samples"], ours["clock"], ours["ratio"]) == (True, 15, "wall", 1.0)
    assert torch["ratio"] == pytest.approx(0.9, rel=0.01)
    labels = dict(shown["provenance"])
    assert labels["Limits"] == "0.2 TFLOP/s float32, 0.1 TFLOP/s bfloat16, 20 GB/s; largest of several products; copy"
    assert labels["Device"] == "backend cpu, kind cpu, count 1, host A CPU, 2 cores, 8 GiB, load 0.1"
    assert labels["Commit"] == "0123abc"


def test_nothing_from_the_data_is_markup():
    found = document()
    found["device"]["host"] = found["commit"] = found["cases"][0]["case"] = HOSTILE
    runs_of(found, "torch")[0].update(name=HOSTILE, status="refused", reason=HOSTILE, wall_s=None)
    page = page_html(parse_document(found))
    assert page.count("<script") == 2
    assert HOSTILE not in page
    assert data_of(page)["cases"][0]["case"] == HOSTILE
    assert "<title>ejkernel benchmarks: &lt;/script&gt;" in page


def test_slots_in_the_data_stay_text():
    found = document()
    found["commit"] = "@@SCRIPT@@"
    assert dict(data_of(page_html(parse_document(found)))["provenance"])["Commit"] == "@@SCRIPT@@"


def test_policy_allows_this_script_and_style_only():
    page = page_html(parse_document(document()))
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg|http-equiv", "", page)
    for kind, text in (
        ("script", re.findall(r"<script>(.*?)</script>", page, re.DOTALL)),
        ("style", re.findall(r"<style>(.*?)</style>", page, re.DOTALL)),
    ):
        digest = base64.b64encode(hashlib.sha256(text[0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page


def test_numbers_that_json_lacks():
    found = document()
    runs_of(found, "torch")[0].update(status="wrong", wall_s=None, error={"out": {"norm": None, "element": None}})
    shown = content(parse_document(found))
    assert shown["cases"][0]["runs"][2]["error"] is None
    assert "time" not in shown["cases"][0]["runs"][2]
    json.dumps(shown, allow_nan=False)


def test_no_cases(tmp_path):
    found = document(operations=())
    assert data_of(write_page(parse_document(found), tmp_path / "page.html").read_text())["cases"] == []
    assert [path.name for path in write_plots(parse_document(found), tmp_path)] == ["overview.png"]


def test_plots(tmp_path):
    found = document()
    runs_of(found, "torch")[0].update(status="refused", reason="no", wall_s=None)
    runs_of(found, "xla")[3].update(status="wrong", wall_s=None)
    names = ["overview", "flash_attention", "rms_norm", "softmax"]
    paths = write_plots(parse_document(found), tmp_path / "plots")
    assert [path.name for path in paths] == [f"{name}.png" for name in names]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 150_000
    page, *again = write(found, tmp_path / "again")
    assert page.name == "index.html"
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_without_matplotlib(tmp_path):
    """The page needs nothing; the pictures say in one sentence what they need."""
    script = f"""
import json, sys
sys.modules["matplotlib"] = None
from ejkernel_bench.report import write_page, write_plots
from ejkernel_bench._document import parse_document
found = parse_document(json.load(sys.stdin))
write_page(found, {str(tmp_path / "page.html")!r})
try:
    write_plots(found, {str(tmp_path)!r})
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(document()), capture_output=True, text=True, check=True
    )
    assert done.stdout == 'plots need matplotlib; install it with: pip install "ejkernel-bench[plots]"\n'
    assert (tmp_path / "page.html").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (1e-4, "100 us"), (4.56e-6, "4.56 us"), (7e-8, "70.0 ns"), (None, "")],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.4), (0.5, 3), (1e-4, 1e-2), (1e-6, 1.0), (2e-9, 300.0)])
def test_ticks(low, high):
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(ticks)
    assert math.isclose(ticks[0], float(f"{ticks[0]:.2g}"))


def written(folder, *documents):
    """Records in a folder, the section of them, and what it says of each operation."""
    paths = []
    for name, recorded in documents:
        paths.append(folder / name)
        paths[-1].write_text(json.dumps(recorded))
    return write_section(paths, folder / "section"), folder / "section"


def test_a_section_has_a_page_for_each_operation(tmp_path):
    counted, folder = written(tmp_path, ("bench_a.json", document(noise=0.002)))
    assert {path.name for path in folder.glob("*.md")} == {f"{name}.md" for name in counted}
    assert (folder / "records" / "bench_a.json").read_bytes() == (tmp_path / "bench_a.json").read_bytes()
    page = (folder / "softmax.md").read_text()
    assert "6 losses in 6 cases" in page and counted["softmax"].startswith("6 losses in 6 cases")
    assert page.count('<section class="measurement"') == 2  # forward and backward
    assert re.findall(r'class="bench-row"><code>(\w+)<', page)[:3] == ["T512", "T2048", "T8192"]
    assert page.count("<title>xla: ") == page.count("<title>torch: ") == 6
    assert "[bench_a.json](records/bench_a.json), 2026-11-21, commit 0123abc, jax 0.11.2:" in page
    assert "```bash\nejkernel bench --size cpu\n```" in page


def test_one_loss_is_one(tmp_path):
    recorded = document(operations=("softmax",), lengths=(512,), noise=0.002)
    recorded["cases"] = recorded["cases"][:1]
    counted, _ = written(tmp_path, ("bench_a.json", recorded))
    assert counted == {"softmax": "1 loss in 1 case that another library ran too."}


def test_a_section_leaves_a_peer_where_its_newest_time_is(tmp_path):
    old = document(operations=("softmax",), lengths=(512,), noise=0.002)
    new = {**document(operations=("softmax",), lengths=(512,), noise=0.002), "date": "2026-12-01T00:00:00Z"}
    for case in new["cases"]:
        case["runs"] = [run for run in case["runs"] if run["name"] != "torch"]
    _, folder = written(tmp_path, ("bench_old.json", old), ("bench_new.json", new))
    rows = re.findall(r'<div class="bench-row">.*?</b></div>', (folder / "softmax.md").read_text())
    assert [("2026-12-01" in row, "jax.nn: " in row, "torch: " in row) for row in rows[:2]] == [
        (True, True, False),
        (False, False, True),
    ]


def test_runs_of_a_section_have_colours_of_their_own(tmp_path):
    _, folder = written(tmp_path, ("bench_a.json", document()))
    legend = re.search(r'<ul class="bench-legend">.*?</ul>', (folder / "softmax.md").read_text())
    assert legend
    colours = re.findall(r"fill=\"var\(--run-(\d+)\)", legend[0])
    assert len(colours) == len({*colours}) == 3


def test_commands_are_those_of_the_operation():
    recorded = {**document(), "command": "ejkernel bench softmax rope --out a.json --rounds 3; ejkernel bench rms_norm"}
    assert commands(parse_document(recorded), "softmax") == ["ejkernel bench softmax rope --rounds 3"]
    assert commands(parse_document(recorded), "rms_norm") == ["ejkernel bench rms_norm"]


def test_no_name_of_a_section_is_markup(tmp_path):
    recorded = document(operations=("softmax",), lengths=(512,))
    for case in recorded["cases"]:
        case["case"] = "<b>bold"
    _, folder = written(tmp_path, ("bench_a.json", recorded))
    assert "<b>bold" not in (folder / "softmax.md").read_text()
