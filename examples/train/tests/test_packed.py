"""Documents packed into rows: each is computed as if it stood alone, and every label that counts weighs the same."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_train import __main__ as command, data, report
from ejkernel_train.config import MODELS, TrainConfig
from ejkernel_train.data import IGNORED, START, Document, Packed
from ejkernel_train.model import Model, positions
from ejkernel_train.operations import choose
from ejkernel_train.sharding import Layout

LENGTH = 112
SIZES = (33, 65, 33, 65, 33)
TINY = TrainConfig(dtype="float32", length=LENGTH, packed=True)
TOLERANCE = {"llama": 1e-5, "moe": 1e-5, "mamba2": 1e-5, "hybrid": 1e-4}
"""Of the largest number in a gradient. The tiny hybrid magnifies rounding (see `test_train.py`)."""


@functools.cache
def documents() -> list[Document]:
    """Of which some have few labels that count."""
    random = np.random.default_rng(0)
    shares = (0.1, 0.9, 1.0, 0.3, 0.5)
    return [
        Document(random.integers(0, START, size).astype(np.int32), random.random(size) < share)
        for size, share in zip(SIZES, shares, strict=True)
    ]


@functools.cache
def rows() -> Packed:
    return data.pack(documents(), LENGTH)


def alone(size: int) -> Packed:
    """The documents of this size, in a row each."""
    tokens, learnt = (np.stack(each) for each in zip(*(one for one in documents() if len(one.tokens) == size), strict=True))
    return Packed(tokens[:, :-1], np.where(learnt[:, 1:], tokens[:, 1:], IGNORED))


def close(found: Any, wanted: Any, tolerance: float) -> None:
    for (path, each), right in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        scale = float(np.abs(right).max())
        np.testing.assert_allclose(each, right, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))
        assert scale > 0


def test_rows():
    """The longest first, into the fullest row with room."""
    packed = rows()
    assert packed.documents.shape == (3, LENGTH)
    assert [np.unique(row, return_counts=True)[1].tolist() for row in packed.documents] == [
        [16, 64, 32],
        [16, 64, 32],
        [80, 32],
    ]
    assert packed.tokens[0, 64:96].tolist() == documents()[0].tokens[:-1].tolist()
    assert np.sum(packed.labels != IGNORED) == sum(np.sum(one.learnt[1:]) for one in documents())
    for row in range(3):
        last = packed.documents[row, :-1] != packed.documents[row, 1:]
        inside = (packed.labels[row, :-1] != IGNORED) & ~last
        assert np.all(packed.labels[row, :-1][inside] == packed.tokens[row, 1:][inside])
    np.testing.assert_array_equal(positions(jnp.asarray(packed.documents))[2, :34], [*range(32), 0, 1])


def test_long_documents_are_cut():
    """Each piece begins with the last label of the one before; one of which nothing is learnt is left out."""
    tokens = np.arange(1, 26, dtype=np.int32)
    packed = data.pack([Document(tokens, (tokens > 9) & (tokens < 20))], 8)
    assert packed.tokens.tolist() == [[9, *range(10, 17)], [*range(17, 25)]]
    assert packed.labels.tolist() == [[*range(10, 18)], [18, 19, *[IGNORED] * 6]]
    with pytest.raises(ValueError, match="no token that is learnt"):
        data.pack([Document(tokens, tokens < 2)], 8)


@pytest.mark.parametrize("kernels", ["ejkernel", "plain"])
@pytest.mark.parametrize("model", MODELS)
def test_packed_rows_are_the_mean_over_separate_documents(model: str, kernels: str):
    config = dataclasses.replace(TINY, model=model, kernels=kernels)
    weights = Model(config.sizes, jax.random.key(1))
    apart = [alone(size) for size in sorted({*SIZES})]
    counts = [np.sum(each.labels != IGNORED) for each in apart]

    def cross_entropy(model: Model, rows: Packed) -> jax.Array:
        return model.losses(rows, choose(kernels), "float32")[0]

    def mean(model: Model) -> jax.Array:
        return sum(count * cross_entropy(model, each) for count, each in zip(counts, apart, strict=True)) / sum(counts)

    wanted_loss, wanted = jax.jit(jax.value_and_grad(mean))(weights)
    loss, found = jax.jit(jax.value_and_grad(cross_entropy))(weights, rows())
    assert float(loss) == pytest.approx(float(wanted_loss), abs=3e-6)
    close(found, wanted, TOLERANCE[model])


@functools.cache
def batch() -> Packed:
    """Eight rows, of which every other has few labels that count."""
    chosen = data.batch(rows(), 0, 0, 8, LENGTH)
    assert isinstance(chosen, Packed)
    few = (np.arange(8)[:, None] % 2 == 0) & (np.arange(LENGTH) % 16 > 0)
    return chosen._replace(labels=np.where(few, IGNORED, chosen.labels))


@pytest.mark.parametrize(("model", "mesh"), [("llama", ""), ("llama", "data=2"), ("mamba2", ""), ("hybrid", "")])
def test_parts_with_uneven_masks_have_the_gradient_of_the_batch(model: str, mesh: str):
    found: list[tuple[float, float, Any]] = []
    for parts in (1, 2, 4):
        build = report.Build(dataclasses.replace(TINY, model=model, mesh=mesh, batch=8, accumulate=parts))
        state, measured = build.step(build.state, batch())
        found.append((measured.loss, measured.norm, state.moments[1][0].mu))
    for loss, norm, moments in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=2e-6)
        assert norm == pytest.approx(found[0][1], rel=1e-4)
        close(moments, found[0][2], 3 * TOLERANCE[model])


@pytest.mark.parametrize(
    ("model", "kernels", "mesh"),
    [
        ("llama", "ejkernel", "fsdp=2,tensor=2"),
        ("hybrid", "ejkernel", "data=4"),
        ("mamba2", "ejkernel", "fsdp=2,tensor=2"),
        ("moe", "ejkernel", "data=2,expert=2"),
        ("llama", "plain", "data=4"),
        ("mamba2", "plain", "data=4"),
    ],
)
def test_a_mesh_changes_no_gradient_of_packed_rows(model: str, kernels: str, mesh: str):
    """Labels that count are spread unevenly over the devices, and so is what follows the last documents."""
    config = dataclasses.replace(TINY, model=model, kernels=kernels)
    weights = Model(config.sizes, jax.random.key(1))

    def loss(model: Model, rows: Packed, layout: Layout) -> jax.Array:
        return model.loss(rows, choose(kernels), "float32", layout)

    (wanted_loss, wanted), (found_loss, found) = (
        jax.jit(
            jax.value_and_grad(functools.partial(loss, layout=layout)),
            in_shardings=None if layout.mesh is None else (layout.shardings(weights), layout.batch()),
        )(weights, batch())
        for layout in (Layout(), Layout.parse(mesh))
    )
    assert float(found_loss) == pytest.approx(float(wanted_loss), abs=3e-6)
    close(found, wanted, 2 * TOLERANCE[model])


@pytest.mark.parametrize("mesh", ["", "expert=2"])
def test_experts_get_nothing_that_follows_the_last_document(mesh: str):
    """So the balance of rows is that of longer ones."""
    config, layout = dataclasses.replace(TINY, model="moe"), Layout.parse(mesh)
    weights, short = Model(config.sizes, jax.random.key(1)), batch()
    longer = Packed(
        *(np.pad(each, ((0, 0), (0, 40)), constant_values=value) for each, value in zip(short, (7, IGNORED, -1), strict=True))
    )
    run = jax.jit(lambda model, rows: model.losses(rows, choose("ejkernel"), "float32", layout))
    for found, wanted in zip(run(weights, longer), run(weights, short), strict=True):
        assert float(found) == pytest.approx(float(wanted), abs=1e-6)


def test_each_row_comes_once_before_one_comes_again():
    source = Packed(*(np.arange(10, dtype=np.int32)[:, None],) * 3)
    order = [row for step in range(10) for row in data.batch(source, 3, step, 3, 1)[0][:, 0].tolist()]
    assert all(sorted(order[first : first + 10]) == [*range(10)] for first in (0, 10, 20))
    assert order[:10] != order[10:20]
    assert order != [row for step in range(10) for row in data.batch(source, 4, step, 3, 1)[0][:, 0].tolist()]


LINES = [
    {"text": "ab"},
    {"prompt": "Q", "completion": "é"},
    {"tokens": [5, 6, 7], "loss_mask": [0, 0, 1]},
    {"tokens": [8, 9]},
]


def test_files_of_documents(tmp_path: Path):
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    (tmp_path / "a.txt").write_bytes(b"\xff\n")
    found = [(each.tokens.tolist(), each.learnt.astype(int).tolist()) for each in data.documents([tmp_path])]
    assert found == [
        ([START, 255, 10, START], [0, 1, 1, 1]),
        ([START, 97, 98, START], [0, 1, 1, 1]),
        ([START, 81, 0xC3, 0xA9, START], [0, 0, 1, 1, 1]),
        ([5, 6, 7], [0, 0, 1]),
        ([8, 9], [1, 1]),
    ]
    assert len(data.documents([tmp_path / "b.jsonl"])) == 4


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: "),
        ("[]", "line 1: give an object with text, with prompt and completion, or with tokens"),
        ('{"tokens": [1, -1]}', "line 1: give an object"),
        ('{"tokens": [1, 2], "loss_mask": [1]}', "line 1: loss_mask is not a list of 2 numbers"),
    ],
)
def test_lines_that_are_no_documents(line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text(line)
    assert command.main(["--data", str(tmp_path)]) == 2
    assert f"--data {tmp_path / 'a.jsonl'}, {said}" in capsys.readouterr().err


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text('{"prompt": "one two ", "completion": "three four"}\n' * 30)
    asked = [
        "--data",
        str(tmp_path),
        *["--steps", "3", "--batch", "2", "--length", "64", "--dtype", "float32", "--kernels", "plain"],
    ]
    assert command.main(asked) == 0
    assert command.main([*asked, "--text", __file__]) == 2
    assert command.main(["--data", str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert "--data are documents and --text is one text" in said and "nowhere is no file or folder" in said
