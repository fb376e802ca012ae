"""`selective_scan` in Triton on a machine without a GPU: numbers in the interpreter, machine code ahead of time, lowering."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from both_phases import check_phases, cotangents_of

import ejkernel
from ejkernel.call import ArraySpec
from ejkernel.call.case import Case
from ejkernel.operations.selective_scan.cases import CASES, arrays
from ejkernel.operations.selective_scan.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel_triton._ahead_of_time import TOLERATED, recorded, target_of
from ejkernel_triton._jax_triton import intercept_launches
from ejkernel_triton._versions import version_problem
from ejkernel_triton.selective_scan import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import testing
from ejkernel_triton.selective_scan import kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")


TOKENS = ("x", "B", "C", "dt")
NAMED = {case.name: case for case in CASES}
SMALL = [case.name for case in CASES if not case.tags & {"bench", "bench-cpu", "nan"}]


def bound_of(maker, dtype="float32"):
    made = {
        name: jnp.asarray(value, dtype if value.dtype == np.float32 else None)
        for name, value in maker(np.random.default_rng(0)).items()
    }
    bound = OPERATION.canonicalise(**made)
    return bound.call, bound.inputs


def check(call, inputs, choice, limits=(2e-6, 1e-5), unused=None):
    """Tokens that are `unused` hold NaN."""
    cotangents = cotangents_of(OPERATION, call)
    if unused is not None:
        held = {name: getattr(inputs, name).at[:, unused].set(jnp.nan) for name in TOKENS}
        inputs, cotangents = inputs._replace(**held), cotangents._replace(out=cotangents.out.at[:, unused].set(jnp.nan))
    check_phases(OPERATION, kernel, call, inputs, (choice, choice), limits, cotangents)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("choice", [config.Config(0, 4, 4, 1), config.Config(8, 2, 8, 1)], ids=["whole", "segments"])
def test_every_case(interpreted, name, choice):
    call, inputs = bound_of(NAMED[name].arrays)
    check(call, inputs, choice, (2e-3, 2e-3) if "extreme" in NAMED[name].tags else (2e-6, 1e-5))


@pytest.mark.parametrize("length", [7, 8, 9, 16])
def test_lengths_around_chunks_and_segments(interpreted, length):
    check(*bound_of(arrays(2, length, 6, 4, state=True)), config.Config(8, 4, 4, 1))


@pytest.mark.parametrize(("dtype", "limits"), [("bfloat16", (8e-3, 1.6e-2)), ("float16", (1e-3, 2.5e-3))])
def test_narrow_dtypes(interpreted, dtype, limits):
    check(*bound_of(arrays(1, 40, 8, 4, state=True), dtype), config.Config(16, 8, 8, 1), limits)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("width", [16, 20], ids="n{}".format)
def test_states_in_arrays_of_gradients(interpreted, dtypes, width):
    """x and dt in dtypes of their own, with as many numbers of state as their gradients hold and with more, and with a tail."""
    call, inputs = bound_of(arrays(2, 44, 8, width, state=True), dtypes[0])
    inputs = inputs._replace(dt=inputs.dt.astype(dtypes[1]))
    call = dataclasses.replace(call, dt=ArraySpec.of(inputs.dt))
    check(call, inputs, config.Config(16, 8, 8, 1), (8e-3, 1.6e-2))


@pytest.mark.parametrize("bounds", [None, (0, 9, 17, 24)], ids=["rows", "packed"])
@pytest.mark.parametrize(("channels", "warps"), [(16, 2), (10, 4)])
def test_sums_over_warps(interpreted, channels, warps, bounds):
    check(*bound_of(arrays(1, 24, channels, 16, state=True, bounds=bounds)), config.Config(8, 4, 16, warps))


def test_members_with_matrices_of_their_own(interpreted):
    """As a batch axis that `jax.vmap` folded."""
    call, inputs = bound_of(arrays(2, 10, 4, 4, state=True))
    doubled = {name: jnp.concatenate([getattr(inputs, name), 2 * getattr(inputs, name)]) for name in ("A", "D")}
    inputs = inputs._replace(**doubled)
    call = dataclasses.replace(call, **{name: ArraySpec.of(array) for name, array in doubled.items()})
    check(call, inputs, config.Config(4, 2, 4, 1))


def test_a_decay_of_zero_forgets(interpreted):
    """An exponent beyond float32 is a decay of 0: nothing before it is seen, forward or backward."""
    call, inputs = bound_of(arrays(1, 24, 4, 4, state=True))
    check(call, inputs._replace(dt=inputs.dt.at[0, 13].set(1e30), x=inputs.x.at[0, 13].set(0)), config.Config(8, 4, 4, 1))


BOUNDS = {
    "chunks": (0, 4, 12, 20),
    "segments": (0, 8, 16, 24),
    "beside-segments": (0, 7, 9, 15, 17, 24),
    "empty": (0, 0, 5, 5, 5, 16, 16, 24, 24),
    "one-token": (0, 1, 2, 3, 11, 12, 13, 23, 24),
    "one": (0, 24),
    "tokens-before-and-after": (3, 9, 10, 18),
    "segments-before-and-after": (8, 8, 16, 16),
    "within-a-chunk": (13, 14, 15),
}


@pytest.mark.parametrize("choice", [config.Config(0, 4, 4, 1), config.Config(8, 4, 2, 1)], ids=["whole", "segments"])
@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_of_documents(interpreted, name, choice):
    bounds, tokens = BOUNDS[name], np.arange(24)
    call, inputs = bound_of(arrays(1, 24, 3, 3, state=True, bounds=bounds))
    check(call, inputs, choice, unused=(tokens < bounds[0]) | (tokens >= bounds[-1]))


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_documents(interpreted, rows):
    """As `jax.vmap` folds them, with the same documents in every row or each with its own."""
    call, inputs = bound_of(arrays(2, 22, 4, 4))
    bounds = jnp.asarray([[0, 5, 13, 21], [2, 2, 16, 22]][:rows], jnp.int32)
    call = dataclasses.replace(call, cu_seqlens=ArraySpec.of(bounds))
    state = jnp.asarray(np.random.default_rng(2).standard_normal(call.state_shape), jnp.float32)
    call = dataclasses.replace(call, initial_state=ArraySpec.of(state))
    check(call, inputs._replace(cu_seqlens=bounds, initial_state=state), config.Config(8, 4, 4, 1))


@pytest.mark.parametrize("marked", [{"bounds": (0, 6, 11, 19, 24)}, {"segments": ((0,) * 6 + (1,) * 5 + (2,) * 8 + (3,) * 5,)}])
@pytest.mark.parametrize("choice", [config.Config(0, 4, 4, 1), config.Config(8, 4, 4, 1)], ids=["whole", "segments"])
def test_nan_of_a_document_reaches_no_other(interpreted, choice, marked):
    """Nor does its gradient, but for those of A and D, which documents share."""
    call, inputs = bound_of(arrays(1, 24, 4, 3, **marked))
    own = np.isin(np.arange(24), np.arange(11, 19))
    cotangents = cotangents_of(OPERATION, call)

    def run(inputs, cotangents):
        outputs = kernel.forward(call, inputs, choice)
        gradients = kernel.backward(call, inputs, outputs, cotangents, choice)
        return {"out": outputs.out, **{name: getattr(gradients, name) for name in TOKENS}}

    held = {name: getattr(inputs, name).at[:, 13].set(jnp.nan) for name in TOKENS}
    found = run(inputs._replace(**held), cotangents._replace(out=cotangents.out.at[:, 17].set(jnp.nan)))
    wanted = run(inputs, cotangents)
    for name, value in found.items():
        assert np.isnan(value[:, own]).any(), name
        np.testing.assert_array_equal(value[:, ~own], wanted[name][:, ~own], err_msg=name)


def test_configs_say_what_is_wrong():
    with pytest.raises(ValueError, match="chunk_size: got 3"):
        config.Config(0, 3, 4, 1)
    with pytest.raises(ValueError, match="segment_size: got 12, expected 0 or a multiple of chunk_size, 8"):
        config.Config(12, 8, 4, 1)


def test_segments_fill_the_device():
    """Few channels run many segments, many channels one; one token is one step of it."""
    few, many = (bound_of(arrays(batch, 4096, channels, 16))[0] for batch, channels in ((1, 64), (1, 4096)))
    assert config.forward_heuristic(few, H200).segment_size == 128
    assert config.forward_heuristic(many, H200).segment_size == 256
    step, _ = bound_of(arrays(64, 1, 256, 16, state=True))
    assert config.forward_space(step, H200)[0] == config.Config(0, 1, 16, 1)


def test_gradients_keep_no_states_of_their_own():
    """What the launches allocate beside results, per token and channel of bfloat16 with 16 numbers of state."""
    allocated: list[int] = []

    def launch(kernel, inputs, outputs, *, input_output_aliases=None, **_):
        given = set((input_output_aliases or {}).values())
        sizes = [np.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in outputs]
        allocated.append(sum(int(size) for i, size in enumerate(sizes) if i not in given))
        return [jnp.zeros(shape, dtype) for shape, dtype in outputs]

    def run(inputs, outputs):
        return kernel.backward(call, inputs, outputs, outputs, config.backward_heuristic(call, H200))

    call, inputs = bound_of(arrays(1, 8192, 1024, 16), "bfloat16")
    with intercept_launches(launch):
        jax.eval_shape(run, inputs, jax.eval_shape(lambda: cotangents_of(OPERATION, call)))
    gradients = 2 * call.x.nbytes  # of x and dt
    partial_sums = 2 * 8192 * 1024  # of the gradients of B and C, of 16 channels each
    of_segments = 3 * 32 * inputs.A.size * 4  # states after each, their gradients, and gradients of A
    assert sum(allocated) - gradients < 2 * partial_sums + of_segments + 8192 * 1024


@pytest.mark.parametrize(("bounds", "stack"), [(None, 0), ((0, 100, 101, 512), 32)], ids=["rows", "packed"])
def test_compiles_within_the_limits(triton_cache, bounds, stack):
    """Only with packed sequences the gradients' kernel leaves registers, and no innermost loop of it does."""
    case = Case("compiled", arrays(1, 512, 512, 16, bounds=bounds))
    launched = [launch for _, launch in recorded("selective_scan", case, "bfloat16", target_of(90))]
    names = [launch.kernel.fn.__name__ for launch in launched]
    assert names == ["segment_kernel", "scan_kernel", "segment_kernel", "gradient_kernel"]
    tolerated = testing.tolerated_stack(elsewhere=160)  # 3.9's
    found = [testing.resources(launch.compile(90)) for launch in launched]
    assert max(each.stack for each in found) <= tolerated + stack
    assert max(each.spilling for each in found) <= (0.12 if tolerated else TOLERATED)


@needs_jax_triton
@pytest.mark.parametrize("length", [64, 60, 1])
def test_lowers_for_cuda(length):
    def loss(values):
        return OPERATION.invoke(values, {}, platform="triton")[0].astype(jnp.float32).sum()

    shapes = {"x": (1, length, 32), "A": (32, 16), "B": (1, length, 16), "C": (1, length, 16), "dt": (1, length, 32)}
    values = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss)).trace(values).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert "ejkernel.selective_scan.backward[triton]" in text
    assert text.count("stablehlo.custom_call @triton_kernel_call") >= 2


def test_supports():
    call, _ = bound_of(arrays(1, 8, 4, 4))
    if version_problem() is None:
        assert capability.supports_backward(call, H200) is None
    assert "the target is cpu" in str(capability.supports_forward(call, Target("cpu")))
    many = dataclasses.replace(call, cu_seqlens=ArraySpec((1, 2**27 + 1), "int32"))
    assert "134217728 packed sequences are more than" in str(capability.supports_forward(many, H200))
    wider = dataclasses.replace(call, A=ArraySpec((1, 4, 257), "float32"))
    assert "A's width 257 is not in 1 ... 256" in str(capability.supports_forward(wider, H200))
    double = dataclasses.replace(call, dt=ArraySpec(call.dt.shape, "float64"))
    assert "dt is float64" in str(capability.supports_forward(double, H200))
