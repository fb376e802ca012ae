"""`paged_cache_update` on TPU without one: where tokens go, numbers under Pallas's TPU interpreter, and what is refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_interpreter import interpreted

from ejkernel.call import ArraySpec
from ejkernel.operations.paged_cache_update import cases, reference
from ejkernel.operations.paged_cache_update.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_pallas._jax_interpreter import tpu_races
from ejkernel_pallas.tpu.paged_cache_update import capability, config, kernel, schedule

V6E = Target("tpu", "TPU v6 lite")
MIX = ((3, 3), (1, 7), (9, 13), (0, 4))


def problem(requests, options=None, **arrays):
    made = cases._arrays(requests, **arrays)(np.random.default_rng(0))
    bound = OPERATION.canonicalise(**{name: jnp.asarray(value) for name, value in made.items()}, **(options or {}))
    return bound.call, bound.inputs


def exact(call, inputs):
    return reference.forward(call, widened(inputs))


def check(call, inputs, outputs):
    for got, wanted in zip(outputs, exact(call, inputs), strict=True):
        if wanted is not None:
            np.testing.assert_allclose(np.asarray(got).astype(np.float64), wanted, rtol=1e-6)


def slots(call, inputs):
    """Page and place of every token that is stored."""
    return {(b, token): (page, offset) for b, token, page, offset in reference._slots(call, inputs)}


def described(inputs):
    return inputs.query_start_loc, inputs.kv_lens, inputs.block_tables


@pytest.mark.parametrize("tile", [4, 16])
@pytest.mark.parametrize("broken", [False, True])
def test_runs_copy_every_token_once(tile, broken):
    call, inputs = problem(MIX, page_size=8, broken=broken, spare_tokens=3)
    runs = schedule.make_runs(call, *described(inputs), tile)
    got = {}
    for token, (page, offset, size) in enumerate(zip(*map(np.asarray, runs), strict=True)):
        assert size == 0 or (size & (size - 1) == 0 and token % tile + size <= tile and offset + size <= 8)
        for i in range(size):
            assert (0, token + i) not in got
            got[0, token + i] = (page, offset + i)
    assert got == slots(call, inputs)
    assert broken or (np.asarray(runs.size) > 1).any()


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_chunks_have_every_token_once(rows):
    call, inputs = problem(MIX, page_size=8, layout="phtd", options={"layout": "phtd"}, spare_tokens=3)
    chunks, count, token = schedule.make_chunks(call, *described(inputs), rows)
    assert int(count) <= schedule.max_chunks(1, 16, 4, rows) == len(chunks.page)
    assert int(chunks.shared[0]) == 0
    got = {}
    for i in range(int(count)):
        for row in range(int(chunks.low[i]), int(chunks.high[i])):
            assert (0, int(token[i, row])) not in got
            got[0, int(token[i, row])] = (int(chunks.page[i]), int(chunks.offset[i]) + row)
    assert got == slots(call, inputs)
    assert (np.asarray(chunks.page)[int(count) :] == -1).all()


@pytest.mark.parametrize(
    "arrays",
    [
        {"stored": "int8", "scales": (2,), "layout": "packed", "padded_heads": 1, "padded_size": 3},
        {"layout": "hptd", "scales": (2,)},
        {"layout": "pthd", "value_size": 5, "broken": True},
    ],
    ids=["packed-int8-padded", "heads-first", "tokens-first"],
)
def test_numbers_without_races(arrays):
    call, inputs = problem(MIX, {"layout": arrays["layout"]}, page_size=8, **arrays)
    with interpreted(detect_races=True):
        outputs = jax.block_until_ready(jax.jit(lambda inputs: kernel.forward(call, inputs, config.Config(8)))(inputs))
        assert not tpu_races()
    check(call, inputs, outputs)


def test_requests_that_write_into_one_chunk():
    """Two requests own halves of one page: neither loses what the other wrote, though a chunk is read before it is written."""
    call, inputs = problem(((2, 2), (2, 6), (1, 5)), {"layout": "phtd"}, page_size=4, layout="phtd")
    tables = np.array(inputs.block_tables)
    tables[0, 1, 1] = tables[0, 0, 0]
    inputs = inputs._replace(kv_lens=jnp.asarray([[4, 6, 5]], jnp.int32), block_tables=jnp.asarray(tables))
    assert int(schedule.make_chunks(call, *described(inputs), 4)[0].shared[0]) == 1
    with interpreted():
        check(call, inputs, jax.jit(lambda inputs: kernel.forward(call, inputs, config.Config(8)))(inputs))


def test_int8_rounds_to_even_and_saturates():
    call, inputs = problem(((4, 4),), stored="int8", heads=1, head_size=2)
    new = jnp.array([[0.5, 1.5], [-2.5, 300.0], [-jnp.inf, jnp.nan], [127.4, -128.5]]).reshape(1, 4, 1, 2)
    with interpreted():
        outputs = jax.jit(lambda inputs: kernel.forward(call, inputs, config.Config(8)))(inputs._replace(key=new))
    page = int(inputs.block_tables[0, 0, 0])
    np.testing.assert_array_equal(outputs.key_pages[0, page, :, 0], [[0, 2], [-2, 127], [-128, 0], [127, -128]])


def test_supports_refuses_with_numbers():
    call, _ = problem(MIX)

    def ask(target=V6E, **changes):
        return capability.supports(dataclasses.replace(call, **changes), target)

    assert ask() is None
    assert "needs a TPU" in ask(target=Target("gpu", ""))
    assert "key is float16" in ask(key=ArraySpec((1, 13, 2, 8), "float16"))
    new = ArraySpec((1, 1 << 18, 2, 8), "float32")
    assert "the slots of 262144 tokens are 786432 numbers, at most 229376 fit into SMEM" in ask(key=new, value=new)
    assert capability.supports(problem(MIX, {"layout": "phtd"}, layout="phtd")[0], V6E) is None


def test_config_names_a_bad_value():
    with pytest.raises(ValueError, match=r"slots: got 12, expected a power of two"):
        config.Config(12)
