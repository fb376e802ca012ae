"""`ejkernel demo`, small and in full."""

from __future__ import annotations

import functools
import importlib.resources
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel_demo import data, model, report, serve, train
from ejkernel_demo.plot import drawn_curves
from ejkernel_demo.primitives import ejkernel_primitives, plain_primitives
from ejkernel_demo.requests import Scheduler, requests_from

SHAPE = model.Shape(width=32, layers=1, heads=4, key_heads=2, hidden=48, length=32)
SMALL = functools.partial(train.Settings, batch=4, warmup=2, shape=SHAPE)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The demo with a model that compiles at once; returns where it writes."""
    monkeypatch.setattr(train, "Settings", SMALL)
    return tmp_path / "out"


def test_json(cli, small: Path):
    answer = cli("demo", "--steps", "12", "--out", str(small), "--json")
    found = answer.json
    assert answer.status == 0
    assert found["ok"]
    assert set(found["runs"]) == {"ejkernel", "plain JAX"}
    for run in found["runs"].values():
        assert len(run["losses"]) == 12
        assert run["losses"][0] == pytest.approx(np.log(256), abs=0.5)
        assert run["losses"][-1] < run["losses"][0] - 0.2
        assert run["compile_seconds"] > 0
    assert found["max_abs_difference"] < 1e-4
    served = {(row["operation"], row["phase"]): row for row in found["served"]}
    assert set(served) == {
        *((name, phase) for name in ("flash_attention", "rms_norm", "rope") for phase in ("forward", "backward")),
        ("paged_attention", "forward"),
        ("paged_cache_update", "forward"),
    }
    assert all(row["implementation"] == "xla" and row["in_compiled_program"] for row in served.values())
    assert Path(found["files"]["plot"]).read_bytes().startswith(b"\x89PNG")
    assert Path(found["files"]["sample"]).read_text() == found["sample"] + "\n"
    assert len(found["sample"]) > 200
    serving = found["serving"]
    assert (serving["requests"], serving["mismatches"]) == (7, 0)
    assert serving["generated"] == sum(len(text["answer"]) for text in serving["texts"]) > 28
    assert serving["mixes"] > 7
    assert max(len(text["prompt"]) for text in serving["texts"]) > 10


def test_screen(cli, small: Path):
    answer = cli("demo", "--steps", "8", "--no-compare", "--platform", "xla", "--out", str(small))
    assert answer.status == 0
    assert "plain JAX" not in answer.out
    for expected in (
        "The Devil's Dictionary",
        "flash_attention",
        "use",
        "ok the loss falls",
        "loss.png",
        "one compiled program",
        "ok",
        "⢕ ejkernel",
    ):
        assert expected in answer.out
    last = answer.out.strip().splitlines()[-1]
    assert re.fullmatch(r"ejkernel brought the loss from \d\.\d+ to \d\.\d+, and served \d+ bytes as a full .+ would\.", last)


def _ran(middle: float, final: float, compilation: float) -> dict[str, Any]:
    spread = [0.9 * middle, middle, 1.1 * middle]
    return {"first_loss": 5.5, "final_loss": final, "compile_seconds": compilation, "step_seconds_quartiles": spread}


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (_ran(0.010, 2.25, 3.0), "runs 2.00 times as fast (10.0 ms a step against 20.0), takes 2.0 s longer to compile"),
        (_ran(0.040, 2.25, 0.5), "loses speed, 0.50 of plain JAX's (40.0 ms a step against 20.0), takes 0.5 s less to compile"),
        (_ran(0.021, 2.25, 1.5), "is neither faster nor slower (21.0 ms a step against 20.0, within their spread), takes"),
    ],
    ids=["gained", "lost", "even"],
)
def test_the_last_sentence_says_what_was_gained_and_lost(ours: dict[str, Any], expected: str):
    found = {"runs": {"ejkernel": ours, "plain JAX": _ran(0.020, 2.26, 1.0)}, "checks": [], "serving": {"generated": 7}}
    said = report.conclusion(found)
    assert said.startswith(f"ejkernel ends with a loss of 2.250 where plain JAX has 2.260, {expected}")
    assert said.endswith("and served 7 bytes as a full recomputation would.")
    failed = report.conclusion({**found, "checks": [{"name": "the loss falls", "ok": False}]})
    assert failed == "1 of 1 checks failed: the loss falls."


def test_curves_fit_and_name_every_run():
    falling = [5.5 / (1 + step / 20) for step in range(200)]
    drawn = drawn_curves({"ejkernel": falling, "plain JAX": [0.1 + value for value in falling]}, 72)
    lines = drawn.splitlines()
    assert len(lines) == 14
    assert max(map(len, lines)) <= 72
    assert "plain JAX" in drawn
    assert "ejkernel" in drawn
    assert lines[-1].split() == ["1", "50", "100", "150", "200"]
    assert "\x1b" not in drawn


def test_a_disagreement_ends_with_status_1(cli, small: Path, monkeypatch: pytest.MonkeyPatch):
    wrong = plain_primitives()._replace(norm=lambda x, scale: x * jnp.broadcast_to(scale, x.shape))
    monkeypatch.setattr(report, "plain_primitives", lambda: wrong)
    answer = cli("demo", "--steps", "3", "--out", str(small), "--json")
    assert answer.status == 1
    failed = [check["name"] for check in answer.json["checks"] if not check["ok"]]
    assert "same loss at the first step" in failed


def test_a_served_byte_that_differs_ends_with_status_1(cli, small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "rotate_at", lambda query, key, positions: (query, key))
    answer = cli("demo", "--steps", "3", "--no-compare", "--out", str(small), "--json")
    assert answer.status == 1
    failed = [check for check in answer.json["checks"] if not check["ok"]]
    assert [check["value"] for check in failed] == [answer.json["serving"]["mismatches"]]
    assert "full recomputation" in failed[0]["name"]


def test_requests_join_when_pages_are_free_and_leave():
    text = bytes(range(97, 123)) * 4
    waiting = requests_from(text, seed=1, length=32, count=5)
    scheduler = Scheduler(waiting, slots=2, tokens=6, pages=6, page_size=8, entries=4)
    steps, most = 0, 0
    while scheduler.busy:
        plan = scheduler.plan()
        new = np.diff(plan.query_start_loc)
        owned = [page for request in waiting for page in request.pages]
        assert len(owned) == len(set(owned)) <= 6
        for slot, count in enumerate(new):
            here = slice(plan.query_start_loc[slot], plan.query_start_loc[slot + 1])
            first = plan.kv_lens[slot] - count
            assert plan.positions[here].tolist() == list(range(first, plan.kv_lens[slot]))
        most = max(most, int((plan.kv_lens > 0).sum()))
        scheduler.advance(np.arange(2) + steps)
        steps += 1
    assert most == 2
    assert all(len(request.answer) == request.count and request.pages == [] for request in waiting)
    assert max(sum(mix) for mix in scheduler.mixes) == 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--steps", "many"), "Invalid value for '--steps'"),
        (("--steps", "1"), "Invalid value for '--steps'"),
        (("--platform", "tritn"), "got 'tritn', expected an installed platform"),
    ],
)
def test_mistakes_are_one_line(cli, arguments: tuple[str, ...], expected: str):
    assert expected in cli("demo", *arguments).mistake


def test_out_that_cannot_be_made(cli, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert cli("demo", "--out", str(tmp_path / "file")).mistake.startswith("--out: ")


@pytest.fixture
def acme() -> Iterator[None]:
    """A platform that refuses everything."""
    ejkernel.kernel_registry.register("rms_norm", "acme", supports=lambda call, target: "never")(print)
    yield
    ejkernel.kernel_registry.unregister("rms_norm", "acme")


@pytest.mark.usefixtures("acme")
def test_platform_that_cannot_run_here(cli):
    said = cli("demo", "--platform", "acme").mistake
    assert "platform acme cannot run" in said
    assert "rms_norm (forward)" in said


def test_same_seed_same_run():
    losses = []
    for seed in (3, 3, 4):
        settings = SMALL(steps=4, seed=seed)
        trainer = train.Trainer(settings, ejkernel_primitives())
        trainer.run(settings.windows(), lambda step, value: None)
        losses.append(trainer.losses)
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_the_rate_rises_then_falls_along_a_cosine():
    """With gradients of 1 Adam moves a parameter by the rate."""
    adam = train._adam(train.Settings(steps=8, warmup=4, learning_rate=0.1))
    state, moved = adam.init(jnp.zeros(())), []
    for _ in range(10):
        update, state = adam.update(jnp.ones(()), state)
        moved.append(-float(update))
    steps = np.arange(10)
    expected = 0.1 * np.minimum((steps + 1) / 4, 1) * (0.55 + 0.45 * np.cos(np.pi * np.minimum(steps / 8, 1)))
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


def test_gradients_agree_with_plain_jax():
    parameters = model.initialise(SHAPE, 0)
    window = jnp.asarray(data.batches(data.load_text(), seed=0, steps=1, batch=2, length=SHAPE.length)[0])
    ours, plain = (jax.grad(model.loss)(parameters, window, SHAPE, p) for p in (ejkernel_primitives(), plain_primitives()))
    for name, expected in plain.items():
        scale = float(jnp.max(jnp.abs(expected)))
        np.testing.assert_allclose(ours[name], expected, atol=1e-5 * scale, err_msg=name)


def test_text_is_real_and_its_origin_is_stated():
    text = data.load_text()
    assert 300_000 < len(text) < 400_000
    assert text.isascii()
    assert b"ZOOLOGY, n." in text
    provenance = importlib.resources.files("ejkernel_demo").joinpath("text/PROVENANCE.md").read_text()
    for expected in ("Ambrose Bierce", "1911", "public domain"):
        assert expected in provenance


def test_batches_are_windows_of_the_text():
    text = data.load_text()
    drawn = data.batches(text, seed=1, steps=2, batch=3, length=20)
    assert (drawn.shape, drawn.dtype) == ((2, 3, 21), np.int32)
    assert all(bytes(window.astype(np.uint8)) in text for window in drawn.reshape(-1, 21))


@pytest.mark.slow
def test_in_full(cli, tmp_path: Path):
    start = time.process_time()
    answer = cli("demo", "--out", str(tmp_path), "--no-compare", "--json")
    assert answer.json["runs"]["ejkernel"]["final_loss"] < 2.5
    assert answer.json["runs"]["ejkernel"]["first_loss"] == pytest.approx(np.log(256), abs=0.2)
    assert time.process_time() - start < 120  # a minute of two cores, however busy the machine is
