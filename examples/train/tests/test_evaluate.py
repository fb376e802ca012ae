"""Held-out text: its loss is the mean over all of its labels, and the run is the same without."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_train import __main__ as command, data, report
from ejkernel_train.config import TrainConfig
from ejkernel_train.data import IGNORED, Document
from ejkernel_train.evaluate import Evaluation
from ejkernel_train.operations import choose
from ejkernel_train.step import initialise

TINY = TrainConfig(dtype="float32", kernels="plain", batch=2, length=32, steps=3)


def test_the_loss_is_the_mean_over_labels():
    """Of windows one after the other, and of documents with uneven masks; the last batch is not full."""
    text = data.load()[:150]
    model = initialise(TINY).model
    wanted = [
        float(model.loss(jnp.asarray(text[None, first : first + 33]), choose("plain"), "float32"))
        for first in range(0, 149, 32)
    ]
    sizes = [32, 32, 32, 32, 21]
    found = Evaluation(TINY, text)(model, 7)
    assert (found.step, found.labels) == (7, 149)
    assert found.loss == pytest.approx(np.average(wanted, weights=sizes), abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    documents = [Document(text[first : first + 33], np.arange(33) > first / 6) for first in (0, 40, 80)]
    packed = data.pack(documents, 32)
    each = [
        float(model.loss(data.Packed(packed.tokens[[row]], packed.labels[[row]]), choose("plain"), "float32"))
        for row in range(3)
    ]
    counts = np.sum(packed.labels != IGNORED, axis=1)
    found = Evaluation(dataclasses.replace(TINY, packed=True), packed)(model, 1)
    assert found.labels == sum(counts) and found.loss == pytest.approx(np.average(each, weights=counts), abs=1e-5)


def test_a_mesh_finds_the_same():
    model, text = initialise(TINY).model, data.load()[:200]
    several = Evaluation(dataclasses.replace(TINY, mesh="data=2"), text)(model, 1)
    assert several.loss == pytest.approx(Evaluation(TINY, text)(model, 1).loss, abs=1e-5)


def test_training_is_the_same():
    learnt, held = data.without(data.load(), 0.01)
    assert len(held) == round(0.01 * len(data.load())) and len(learnt) + len(held) == len(data.load())
    with_, without = report.run([TINY], learnt, held_out=held[:500], evaluate_every=2), report.run([TINY], learnt)
    assert with_["builds"][0]["losses"] == without["builds"][0]["losses"]
    assert [found["step"] for found in with_["evaluations"]] == [2, 3] and without["evaluations"] == []


def test_documents_are_held_out_from_everywhere():
    documents = [Document(np.array([number, 0]), np.array([True, True])) for number in range(10)]
    left, held = data.without(documents, 0.3)
    assert [int(one.tokens[0]) for one in held] == [0, 3, 6]
    assert sorted(int(one.tokens[0]) for one in [*left, *held]) == [*range(10)]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("what is held out")
    small = ["--steps", "2", "--batch", "2", "--length", "16", "--dtype", "float32", "--kernels", "plain"]
    for given in ([str(tmp_path)], ["0.001"], [str(tmp_path / "a.txt"), "--data", str(tmp_path)]):
        out = tmp_path.with_suffix(".json")
        assert command.main([*small, "--evaluate-every", "1", "--out", str(out), "--held-out", *given]) == 0
        said = capsys.readouterr().out
        assert "step     1  held out: loss " in said and "perplexity" in said
        assert [found["step"] for found in json.loads(out.read_text())["evaluations"]] == [1, 2]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--evaluate-every 0", "--evaluate-every is 0"),
        ("--evaluate-every 2", "--evaluate-every needs --held-out"),
        ("--held-out 1.5", "--held-out is 1.5; give a share between 0 and 1"),
        ("--held-out nowhere", "--held-out nowhere is no file or folder"),
        ("--held-out 0.1 --compare", "leave out either --held-out or --compare"),
        ("--held-out 0.0000001", "--held-out 1e-07 has 0 tokens"),
    ],
)
def test_mistakes(asked: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert command.main(asked.split()) == 2
    assert said in capsys.readouterr().err
