"""Numbers of the kernels over rows, run on this host: against the float64 references, between guards, and again."""

from __future__ import annotations

import ctypes
import itertools

import host_kernels
import numpy as np
import pytest
from host_kernels import KINDS, SCALAR_TYPES, Guarded, Mask, Shape, Stored, library, output, rounded

from ejkernel.call import ArraySpec
from ejkernel.operations.add_rms_norm import interface as add_rms_norm, reference as add_rms_norm_reference
from ejkernel.operations.layer_norm import interface as layer_norm, reference as layer_norm_reference
from ejkernel.operations.rms_norm import interface as rms_norm, reference as rms_norm_reference
from ejkernel.operations.softmax import interface as softmax, reference as softmax_reference
from ejkernel_cuda.softmax.mask import axes_of

pytestmark = pytest.mark.skipif(host_kernels.missing() is not None, reason=str(host_kernels.missing()))

TOLERANCE = {"float32": 3e-6, "bfloat16": 4e-3}
LAUNCHES = [
    # dtype, width, packed, threads, packs per thread, blocks of a cluster, rows in shared memory
    ("bfloat16", 64, True, 8, 1, 1, 2),
    ("bfloat16", 40, True, 8, 1, 1, 1),
    ("float32", 8, True, 1, 2, 1, 3),
    ("bfloat16", 33, False, 32, 2, 1, 2),
    ("float32", 1, False, 1, 1, 1, 2),
    ("float32", 100, False, 64, 2, 1, 3),
    ("bfloat16", 1000, True, 64, 2, 1, 8),
    ("float32", 1024, True, 256, 1, 1, 4),
    ("bfloat16", 200, True, 8, 4, 1, 3),
    ("float32", 250, False, 64, 4, 1, 1),
    ("bfloat16", 2400, True, 96, 4, 1, 2),
    ("bfloat16", 3000, True, 512, 1, 1, 2),
    ("bfloat16", 1800, True, 64, 4, 2, 3),
    ("float32", 520, True, 64, 4, 4, 1),
    ("bfloat16", 4096, True, 64, 4, 2, 3),
    ("bfloat16", 1000, True, 64, 0, 1, 1),
    ("float32", 77, False, 32, 0, 1, 1),
]
DIRECT = [
    # the same with rows in registers: of a part of a warp, of a warp, and of several
    ("bfloat16", 8, True, 1, 1, 1, 0),
    ("float32", 8, True, 2, 1, 1, 0),
    ("float32", 8, True, 1, 2, 1, 0),
    ("bfloat16", 24, True, 4, 1, 1, 0),
    ("bfloat16", 64, True, 8, 1, 1, 0),
    ("bfloat16", 120, True, 8, 2, 1, 0),
    ("float32", 52, True, 16, 1, 1, 0),
    ("bfloat16", 128, True, 4, 4, 1, 0),
    ("bfloat16", 248, True, 32, 1, 1, 0),
    ("float32", 256, True, 32, 2, 1, 0),
    ("bfloat16", 1000, True, 32, 4, 1, 0),
    ("bfloat16", 1000, True, 64, 2, 1, 0),
    ("float32", 520, True, 64, 4, 1, 0),
    ("bfloat16", 3000, True, 192, 2, 1, 0),
    ("bfloat16", 2400, True, 96, 4, 1, 0),
]
DIRECT += [
    # where every thread has all of its packs
    ("bfloat16", 2048, True, 64, 4, 1, 0),
    ("float32", 1024, True, 64, 4, 1, 0),
]
MANY_WHOLE = {
    # eight of them, in a block and in a cluster
    "layer_norm": [("bfloat16", 4096, True, 64, 8, 1, 0), ("float32", 2048, True, 64, 8, 1, 0)],
    "rms_norm": [("bfloat16", 8192, True, 64, 8, 2, 0), ("float32", 8192, True, 64, 8, 4, 0)],
}
MANY = [
    # eight packs per thread
    *itertools.chain(*MANY_WHOLE.values()),
    ("bfloat16", 4000, True, 64, 8, 1, 0),
    ("float32", 1020, True, 32, 8, 1, 0),
    ("bfloat16", 7000, True, 64, 8, 2, 0),
    ("float32", 4100, True, 64, 8, 4, 0),
]


def relative(got: np.ndarray, wanted: np.ndarray, floor: float = 0.0) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / max(np.linalg.norm(wanted), floor, 1e-30))


def parameter(guarded: Guarded | None) -> Stored:
    if guarded is None:
        return Stored(None, 0, False)
    members, width = guarded.array.shape
    return Stored(guarded.pointer, width if members > 1 else 0, guarded.array.dtype != np.float32)


NORMS = {
    "rms_norm": (rms_norm.OPERATION, rms_norm_reference),
    "layer_norm": (layer_norm.OPERATION, layer_norm_reference),
    "add_rms_norm": (add_rms_norm.OPERATION, add_rms_norm_reference),
}


class Norm:
    """One problem of a normalisation: 2 batch members of a few rows."""

    def __init__(
        self,
        name: str,
        dtype: str,
        width: int,
        parameters: int,
        scale_offset: float = 0.0,
        stored: str = "float32",
        rows: int = 5,
        spread: tuple[float, float] = (3.0, 2.0),
    ) -> None:
        """parameters: 0 for none, 1 for those that the batch shares, 2 for a scale of each member's; `stored` is their dtype.

        `spread`: mean and deviation of x, and the deviation of the residual.
        """
        rng = np.random.default_rng(width)
        operation, reference = NORMS[name]
        self.centred, self.added = name == "layer_norm", name == "add_rms_norm"
        self.library = library("norms", f"-DNORM={[*NORMS].index(name)}")
        self.dtype, self.width, self.rows = dtype, width, rows
        mean, deviation = spread
        self.x = rounded(rng.normal(size=(2, rows, width)) * deviation + mean, dtype)
        self.grad = rounded(rng.normal(size=(2, rows, width)), dtype)
        self.scale = rounded(rng.normal(size=(parameters, width)), stored) if parameters else None
        self.offset = rounded(rng.normal(size=(1, width)), stored) if parameters and not self.added else None
        self.residual = rounded(rng.normal(size=(2, rows, width)) * deviation / 2, dtype) if self.added else None
        self.grad_sum = rounded(rng.normal(size=(2, rows, width)), dtype) if self.added else None
        # The reference does not round the sum; given the rounded one and nothing to add, it norms what the kernels norm.
        self.sum = rounded(self.x.astype(np.float32) + self.residual.astype(np.float32), dtype) if self.added else self.x
        given = {"x": self.sum, "scale": self.scale}
        given |= {"residual": np.zeros_like(self.sum)} if self.added else {"offset": self.offset}
        specs = {key: None if value is None else ArraySpec.of(value) for key, value in given.items()}
        self.call = operation.Call(**specs, epsilon=1e-5, scale_offset=scale_offset, save_residuals=True)
        wide = operation.Inputs(**{key: None if value is None else value.astype(np.float64) for key, value in given.items()})
        self.outputs = reference.forward(self.call, wide)
        cotangents = {"out": self.grad, "sum": self.grad_sum} if self.added else {"out": self.grad}
        cotangents = operation.Outputs(**{key: value.astype(np.float64) for key, value in cotangents.items()})
        self.gradients = reference.backward(self.call, wide, self.outputs, cotangents)
        weight = 1.0 if self.scale is None else wide.scale[:, None] + scale_offset
        self.floor = float(np.linalg.norm(cotangents.out * weight * self.outputs.rstd[..., None]))

    def forward(self, packed: bool, *shape: int, workers: int, save: bool = True) -> list[np.ndarray]:
        given = (self.x, self.residual, self.scale, self.offset)
        x, residual, scale, offset = (None if value is None else Guarded(value) for value in given)
        groups = 1 if self.scale is None else self.scale.shape[0]
        out, saved = output(self.x.shape, self.x.dtype), (self.centred and save, save)
        mean, rstd = (output((2, self.rows), np.float32) if wanted else None for wanted in saved)
        total = output(self.x.shape, self.x.dtype) if self.added else None
        self.library.norm_forward(
            KINDS[self.dtype], ctypes.c_bool(packed), Shape(2 * self.rows // groups, groups, workers, *shape),
            x.pointer, residual.pointer if residual else None, parameter(scale), parameter(offset), out.pointer,
            total.pointer if total else None, mean.pointer if mean else None, rstd.pointer if rstd else None,
            ctypes.c_int64(self.rows), self.width, ctypes.c_float(1e-5), ctypes.c_float(self.call.scale_offset),
        )  # fmt: skip
        if total:
            np.testing.assert_array_equal(total.checked().view(np.uint8), self.sum.view(np.uint8))
        return [value.checked() for value in (out, mean, rstd) if value]

    def backward(self, packed: bool, *shape: int, workers: int) -> list[np.ndarray]:
        x, grad, rstd = Guarded(self.sum), Guarded(self.grad), Guarded(self.outputs.rstd.astype(np.float32))
        scale = None if self.scale is None else Guarded(self.scale)
        grad_sum = Guarded(self.grad_sum) if self.added else None
        mean = Guarded(self.outputs.mean.astype(np.float32)) if self.centred else None
        groups = 1 if self.scale is None else self.scale.shape[0]
        d_x = output(self.x.shape, self.x.dtype)
        totals = [None if value is None else output(value.shape, value.dtype) for value in (self.scale, self.offset)]
        partials = [None if value is None else output((groups, workers, self.width), np.float32) for value in totals]
        self.library.norm_backward(
            KINDS[self.dtype], ctypes.c_bool(packed), Shape(2 * self.rows // groups, groups, workers, *shape),
            x.pointer, parameter(scale), mean.pointer if mean else None, rstd.pointer, grad.pointer,
            grad_sum.pointer if grad_sum else None, d_x.pointer, *(value.pointer if value else None for value in totals),
            SCALAR_TYPES["float32" if self.scale is None else self.scale.dtype.name],
            *(value.pointer if value else None for value in partials), ctypes.c_int64(self.rows), self.width,
            ctypes.c_float(self.call.scale_offset),
        )  # fmt: skip
        return [value.checked() for value in (d_x, *totals) if value is not None]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("launch", LAUNCHES + DIRECT, ids=str)
def test_norm_forward(launch, name):
    check_norm_forward(launch, name)


PLAIN = [
    # dtype, width, threads of a row, packs per thread: kernels that are compiled for just such rows, and for many of them
    ("bfloat16", 32, 4, 1),
    ("bfloat16", 64, 8, 1),
    ("bfloat16", 128, 16, 1),
    ("bfloat16", 256, 32, 1),
    ("bfloat16", 512, 32, 2),
    ("bfloat16", 1024, 32, 4),
    ("float32", 64, 16, 1),
]
PLAIN_ROWS = 39
"""Of half of a problem: blocks do not divide as many, and for all widths there is more than one."""


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("launch", PLAIN, ids=str)
def test_plain_norm_forward(launch, name):
    dtype, width, threads, packs = launch
    for parameters, scale_offset in ((0, 0.0), (1, 1.0)):
        problem = Norm(name, dtype, width, parameters, scale_offset, dtype, PLAIN_ROWS)
        out, *saved = problem.forward(True, threads, packs, 1, 0, workers=2)
        assert relative(out, problem.outputs.out, floor=1.0) < TOLERANCE[dtype]
        wanted = [*([problem.outputs.mean] if problem.centred else []), problem.outputs.rstd]
        for value, exact in zip(saved, wanted, strict=True):
            assert relative(value, exact) < 2e-6
        (alone,) = problem.forward(True, threads, packs, 1, 0, workers=2, save=False)
        np.testing.assert_array_equal(alone.view(np.uint8), out.view(np.uint8))


@pytest.mark.parametrize("launch", PLAIN, ids=str)
def test_plain_softmax_forward(launch):
    dtype, width, threads, packs = launch
    x, _, _ = softmax_problem(dtype, width, None, PLAIN_ROWS)
    call = softmax.SoftmaxCall(x=ArraySpec.of(x), where=None, scale=0.7, save_residuals=True)
    wanted = softmax_reference.forward(call, softmax.SoftmaxInputs(x.astype(np.float64), None)).out
    given, out = Guarded(x), output(x.shape, x.dtype)
    shape = Shape(6 * PLAIN_ROWS, 1, 2, threads, packs, 1, 0)
    library("softmax").softmax_forward(
        KINDS[dtype], ctypes.c_bool(True), shape, given.pointer, Mask(), out.pointer, width, ctypes.c_float(0.7)
    )
    assert relative(out.checked(), wanted) < TOLERANCE[dtype]
    assert not out.checked()[1, 1, 1].any()


@pytest.mark.parametrize(("name", "launch"), [(name, launch) for name in MANY_WHOLE for launch in MANY_WHOLE[name]], ids=str)
def test_norm_forward_of_many_packs(launch, name):
    check_norm_forward(launch, name)


def check_norm_forward(launch, name):
    dtype, width, *knobs = launch
    for parameters, scale_offset, stored in ((0, 0.0, "float32"), (1, 0.0, dtype), (2, 1.0, "float32")):
        problem = Norm(name, dtype, width, parameters, scale_offset, stored)
        got, again = (problem.forward(*knobs, workers=workers) for workers in (3, 2))
        wanted = [problem.outputs.out, *([problem.outputs.mean] if problem.centred else []), problem.outputs.rstd]
        assert relative(got[0], wanted[0], floor=1.0) < TOLERANCE[dtype]
        for value, exact in zip(got[1:], wanted[1:], strict=True):
            assert relative(value, exact) < 2e-6
        for one, other in zip(got, again, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


WIDE = {"far": (1449.5, 0.45), "large": (0.0, 3e19), "small": (0.0, 1e-25)}
"""Mean and deviation of rows whose mean float32 rounds by more than they may be off, or whose squares it does not hold."""


@pytest.mark.parametrize("spread", WIDE)
@pytest.mark.parametrize(
    ("name", "launch"),
    [(name, launch) for name in NORMS for launch in (*LAUNCHES, *DIRECT, *MANY_WHOLE.get(name, ()))],
    ids=str,
)
def test_norm_forward_of_a_wide_range(name, launch, spread):
    dtype, width, *knobs = launch
    problem = Norm(name, dtype, width, 1, spread=WIDE[spread])
    out, *saved = problem.forward(*knobs, workers=2)
    assert relative(out, problem.outputs.out, floor=1.0) < TOLERANCE[dtype]
    assert relative(saved[-1], problem.outputs.rstd) < 2e-6
    if problem.centred:  # which is compared with what the rows spread over
        assert relative(saved[0], problem.outputs.mean, WIDE[spread][1] * problem.outputs.mean.size**0.5) < 2e-6


SINGLE = [launch for launch in LAUNCHES if launch[0] == "float32" and launch[1] > 1]


@pytest.mark.parametrize("launch", SINGLE, ids=str)
def test_mean_near_zero(launch):
    """A mean that is far smaller than the row's first element is not rounded as that is."""
    dtype, width, *knobs = launch
    problem = Norm("layer_norm", dtype, width, 0, spread=(0.0, 1.0))
    problem.x[..., 0] = 100.0
    problem.x[..., 1] = -100.0 - problem.x[..., 2:].astype(np.float64).sum(-1) + 0.01 * width
    _, mean, _ = problem.forward(*knobs, workers=2)
    assert relative(mean, problem.x.astype(np.float64).mean(-1)) < 1e-4


@pytest.mark.parametrize("launch", SINGLE, ids=str)
def test_norm_backward_of_rows_far_from_zero(launch):
    """Whose mean float32 rounds by more than gradients may be off."""
    dtype, width, *knobs = launch
    problem = Norm("layer_norm", dtype, width, 1, spread=WIDE["far"])
    d_x, d_scale, _ = problem.backward(*knobs, workers=2)
    assert relative(d_x, problem.gradients.x, problem.floor) < TOLERANCE[dtype]
    in_registers = knobs[2] > 0
    assert relative(d_scale, problem.gradients.scale) < (3e-6 if in_registers else 1e-3)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_norm_backward(launch, name):
    dtype, width, *knobs = launch
    for parameters, scale_offset, stored in ((0, 0.0, "float32"), (1, 0.0, "float32"), (2, 1.0, dtype)):
        problem = Norm(name, dtype, width, parameters, scale_offset, stored)
        if parameters == 2:
            problem.offset = None
        got = problem.backward(*knobs, workers=2)
        assert relative(got[0], problem.gradients.x, problem.floor) < TOLERANCE[dtype]
        exact = [problem.gradients.scale] if problem.added else [problem.gradients.scale, problem.gradients.offset]
        for value, wanted in zip(got[1:], exact, strict=False):
            assert relative(value, wanted) < (3e-6 if value.dtype == np.float32 else TOLERANCE["bfloat16"])
        for one, other in zip(got, problem.backward(*knobs, workers=2), strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("launch", [("bfloat16", 40, True, 8, 1, 1, 1), ("float32", 33, False, 64, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("workers", [9, 40, 130])
def test_partial_sums_of_many_workers(launch, workers):
    """Most of them of no rows."""
    dtype, width, *knobs = launch
    problem = Norm("layer_norm", dtype, width, 1)
    got = problem.backward(*knobs, workers=workers)
    assert relative(got[1], problem.gradients.scale) < 3e-6
    assert relative(got[2], problem.gradients.offset) < 3e-6


def softmax_mask(x: np.ndarray, where: np.ndarray | None) -> tuple[Mask, Guarded | None]:
    if where is None:
        return Mask(), None
    guarded, axes = Guarded(where), axes_of(ArraySpec.of(x), ArraySpec.of(where))
    padded = [(*values, *[0] * (8 - len(values))) for values in axes]
    many = ctypes.c_int64 * 8
    return Mask(guarded.pointer, where.shape[-1] != 1, len(axes.sizes), many(*padded[0]), many(*padded[1])), guarded


def softmax_problem(dtype: str, width: int, mask_shape: tuple[int, ...] | None, rows: int = 2):
    """x [2, 3, rows, width], of which masked places hold NaN, a row holds -inf, and the first row of the mask is empty."""
    rng = np.random.default_rng(width)
    x = rng.normal(size=(2, 3, rows, width)) * 4
    x[1, 1, 1] = -np.inf
    grad = rng.normal(size=x.shape)
    where = None
    if mask_shape is not None:
        where = rng.random((*mask_shape[:3], width if mask_shape[3] else 1)) < 0.6
        where[0, 0, 0] = False
        x[~np.broadcast_to(where, x.shape)] = np.nan
        grad[~np.broadcast_to(where, x.shape)] = np.nan
    return rounded(x, dtype), rounded(grad, dtype), where


MASKS = [(2, 3, 2, 1), (2, 1, 2, 1), (1, 3, 1, 1), (1, 3, 2, 0), (2, 1, 1, 0)]


@pytest.mark.parametrize(
    ("launch", "mask_shape"),
    [*itertools.product(LAUNCHES + DIRECT, (None, *MASKS)), *itertools.product(MANY, (None,))],
    ids=str,
)
def test_softmax(launch, mask_shape):
    """Of eight packs per thread forward alone, and without a mask."""
    dtype, width, packed, *knobs = launch
    x, grad, where = softmax_problem(dtype, width, mask_shape)
    spec = None if where is None else ArraySpec.of(where)
    call = softmax.SoftmaxCall(x=ArraySpec.of(x), where=spec, scale=0.7, save_residuals=True)
    inputs = softmax.SoftmaxInputs(x.astype(np.float64), where)
    wanted = softmax_reference.forward(call, inputs)
    mask, kept = softmax_mask(x, where)
    given = Guarded(x)
    kind = KINDS[dtype], ctypes.c_bool(packed)
    for workers in (2, 5):
        shape, out = Shape(12, 1, workers, *knobs), output(x.shape, x.dtype)
        library("softmax").softmax_forward(*kind, shape, given.pointer, mask, out.pointer, width, ctypes.c_float(0.7))
        got = out.checked()
        assert np.isfinite(got.astype(np.float64)).all()
        assert relative(got, wanted.out) < TOLERANCE[dtype]
        assert not got[1, 1, 1].any()
        if where is not None:
            assert not got[~np.broadcast_to(where, x.shape)].any()

    if launch in MANY:
        return
    exact = softmax_reference.backward(
        call, inputs, softmax.SoftmaxOutputs(got.astype(np.float64)), softmax.SoftmaxOutputs(grad.astype(np.float64))
    )
    d_x, stored, arriving = output(x.shape, x.dtype), Guarded(got), Guarded(grad)
    library("softmax").softmax_backward(
        *kind, shape, stored.pointer, arriving.pointer, mask, d_x.pointer, width, ctypes.c_float(0.7)
    )
    floor = np.linalg.norm(got.astype(np.float64) * np.nan_to_num(grad.astype(np.float64)))
    assert relative(d_x.checked(), exact.x, floor) < TOLERANCE[dtype]
    assert kept is None or kept.checked() is kept.array


@pytest.mark.parametrize("scale", [-0.7, 0.0])
@pytest.mark.parametrize("launch", LAUNCHES + DIRECT, ids=str)
def test_softmax_hides_minus_infinity_under_any_scale(launch, scale):
    dtype, width, packed, *knobs = launch
    x, _, _ = softmax_problem(dtype, width, None)
    x[0, 0, 0, ::3] = -np.inf
    call = softmax.SoftmaxCall(x=ArraySpec.of(x), scale=scale)
    wanted = softmax_reference.forward(call, softmax.SoftmaxInputs(x.astype(np.float64))).out
    mask, _ = softmax_mask(x, None)
    given, out = Guarded(x), output(x.shape, x.dtype)
    kind, shape = (KINDS[dtype], ctypes.c_bool(packed)), Shape(12, 1, 2, *knobs)
    library("softmax").softmax_forward(*kind, shape, given.pointer, mask, out.pointer, width, ctypes.c_float(scale))
    got = out.checked()
    assert not got[0, 0, 0, ::3].any()
    assert not got[1, 1, 1].any()
    assert relative(got, wanted) < TOLERANCE[dtype]
