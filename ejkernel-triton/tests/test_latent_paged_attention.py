"""`latent_paged_attention` in Triton on a machine without a GPU: numbers of every kind of config, machine code, refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.call import ArraySpec
from ejkernel.operations.latent_paged_attention import reference
from ejkernel.operations.latent_paged_attention.interface import OPERATION, LatentPagedAttentionInputs
from ejkernel.operations.paged_attention.cases import cache_of
from ejkernel.plugin import Target
from ejkernel.testing.checks import widened
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton._latents.config import LatentAttentionConfig, Problem, max_splits, splits_of
from ejkernel_triton._versions import version_problem
from ejkernel_triton.latent_paged_attention import capability, config

pytest.importorskip("triton", reason="install triton to run Triton kernels in its interpreter")
from ejkernel_triton import _interpreter, testing
from ejkernel_triton._jax_triton import intercept_launches
from ejkernel_triton.latent_paged_attention import kernel

H100 = Target("gpu", "NVIDIA H100 80GB HBM3", "9.0")
needs_jax_triton = pytest.mark.skipif(version_problem() is not None, reason=f"compilation: {version_problem()}")
MIXED = ((1, 70), (3, 40), (0, 9), (1, 1), (5, 5), (1, 0))
TILE = LatentAttentionConfig(block_q=1, block_h=2, block_k=16, splits=1, num_warps=4, num_stages=2, keys_first=False)
CONFIGS = {
    "one token": TILE,
    "several tokens": dataclasses.replace(TILE, block_q=2, block_h=3, block_k=32),
    "keys first": dataclasses.replace(TILE, block_q=4, block_h=3, keys_first=True),
    "split": dataclasses.replace(TILE, splits=3, keys_first=True),
    "split, several tokens": dataclasses.replace(TILE, block_q=2, block_k=32, splits=5),
}


def problem(
    requests=MIXED, *, page_size=8, heads=3, size=8, rotary=4, channels=None, dtype="float32", stored=None, first_keys=False,
    broken_page=False, **options,
):  # fmt: skip
    """A canonical call and its arrays; slots that no request uses hold NaN."""
    rng = np.random.default_rng(0)
    described, used = cache_of(rng, requests, page_size=page_size)
    if broken_page:
        described["block_tables"][0, 3] = len(used)
    tokens = int(described["query_start_loc"][-1]) + 1
    pages = rng.standard_normal((*used.shape, channels or size + rotary)).astype(np.float32) * (1 if stored is None else 40)
    if stored != "int8":
        pages[~used] = np.nan
    if first_keys:
        described["first_keys"] = rng.integers(-2, 30, tokens, np.int32)
    nope, pe = (jnp.asarray(rng.standard_normal((tokens, heads, width)), dtype) for width in (size, rotary))
    bound = OPERATION.canonicalise(nope, pe, jnp.asarray(pages, stored or dtype), **described, return_lse=True, **options)
    return bound.call, bound.inputs


def run(call, inputs, chosen):
    with intercept_launches(_interpreter.interpreted_call):
        return kernel.forward(call, inputs, chosen)


def check(call, inputs, chosen, tolerance=1e-6):
    got, exact = run(call, inputs, chosen), reference.forward(call, widened(inputs))
    assert (got.out.dtype, got.lse.dtype) == (inputs.query_nope.dtype, jnp.float32)
    np.testing.assert_allclose(np.asarray(got.out, np.float64), exact.out, rtol=0, atol=tolerance * 4)
    np.testing.assert_allclose(np.asarray(got.lse, np.float64), exact.lse, rtol=tolerance, atol=tolerance * 4)


PROBLEMS = {
    "plain": {},
    "window": {"sliding_window": 21},
    "window of one": {"sliding_window": 1},
    "first keys": {"first_keys": True},
    "first keys, window": {"first_keys": True, "sliding_window": 17},
    "soft cap": {"logits_soft_cap": 1.5, "softmax_scale": 2.0},
    "int8": {"stored": "int8", "k_scale": np.float32(0.01), "v_scale": np.float32(0.03)},
    "e4m3": {"stored": "float8_e4m3fn", "k_scale": np.float32(-0.02), "v_scale": np.float32(0.02)},
    "no rotary part": {"rotary": 0},
    "rotary part apart": {"channels": 19, "pe_offset": 11},
    "one-token pages": {"page_size": 1},
    "pages of three": {"page_size": 3},
    "pages of blocks": {"page_size": 64},
    "page outside": {"broken_page": True},
    "page of a whole block outside": {"page_size": 16, "broken_page": True},
}


@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_numbers_in_the_interpreter(name, chosen):
    check(*problem(**PROBLEMS[name]), chosen)


@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
def test_numbers_of_narrow_types(chosen):
    check(*problem(dtype="bfloat16"), chosen, 1e-2)


def test_mixed_dtypes_are_multiplied_in_the_wider_one():
    call, inputs = problem(dtype="bfloat16")
    pages = inputs.pages.astype(jnp.float32)
    check(dataclasses.replace(call, pages=ArraySpec.of(pages)), inputs._replace(pages=pages), TILE, 4e-3)


@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
def test_batch_members_share_what_they_may(chosen):
    call, inputs = problem(k_scale=np.float32(0.7), v_scale=np.float32(1.5), first_keys=True)
    doubled = {
        "query_nope": jnp.concatenate([inputs.query_nope, inputs.query_nope[:, ::-1]]),
        "query_pe": jnp.concatenate([inputs.query_pe, 2 * inputs.query_pe]),
        "kv_lens": jnp.concatenate([inputs.kv_lens, jnp.maximum(inputs.kv_lens - 2, 0)]),
        "value_scale": jnp.concatenate([inputs.value_scale, 2 * inputs.value_scale]),
        "first_keys": jnp.concatenate([inputs.first_keys, inputs.first_keys[:, ::-1]]),
    }
    call = dataclasses.replace(call, **{name: ArraySpec.of(array) for name, array in doubled.items()})
    check(call, inputs._replace(**doubled), chosen)


@pytest.mark.parametrize("chosen", CONFIGS.values(), ids=CONFIGS)
def test_tokens_before_the_first_request_and_after_the_last(chosen):
    call, inputs = problem()
    inputs = inputs._replace(query_start_loc=jnp.asarray([[2, 3, 6, 6, 7, 9, 9]], jnp.int32))
    check(call, inputs, chosen)


@pytest.mark.parametrize("name", ["several tokens", "keys first", "split, several tokens"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_only_the_rows_that_see_it(name, bad):
    """The third of six new tokens has such a latent: the first two do not see it."""
    call, inputs = problem(requests=((6, 20),))
    tables, size = np.asarray(inputs.block_tables)[0, 0], call.pages.shape[2]
    inputs = inputs._replace(pages=inputs.pages.at[0, tables[16 // size], 16 % size, 2].set(bad))
    got = run(call, inputs, CONFIGS[name])
    with np.errstate(invalid="ignore"):
        exact = reference.forward(call, widened(inputs))
    np.testing.assert_allclose(got.out[0, :2], exact.out[0, :2], atol=4e-6)
    assert np.isnan(np.asarray(got.out[0, 2:6])).all()
    assert (got.out[0, 6] == 0).all()


@pytest.mark.parametrize("empty", ["query_nope", "kv_lens", "pages"])
def test_nothing_to_attend_to(empty):
    call, inputs = problem()
    cut = {"query_nope": ("query_nope", "query_pe"), "kv_lens": ("kv_lens", "block_tables"), "pages": ("pages",)}[empty]
    fewer = {name: getattr(inputs, name)[:, :0] for name in cut}
    fewer |= {"query_start_loc": inputs.query_start_loc[:, :1]} if empty == "kv_lens" else {}
    call = dataclasses.replace(call, **{name: ArraySpec.of(array) for name, array in fewer.items()})
    got = kernel.forward(call, inputs._replace(**fewer), TILE)
    assert got.out.shape == call.query_nope.shape and (got.out == 0).all() and np.isneginf(got.lse).all()


# Configs and machine code


def shapes_of(requests, keys, page_size, *, tokens=1, dtype="bfloat16", stored=None, heads=128, size=512, rotary=64, **options):
    """A call of the shapes of serving; no arrays."""

    def make():
        zeros, width = jnp.zeros, -(-keys // page_size)
        bound = OPERATION.canonicalise(
            zeros((requests * tokens, heads, size), dtype), zeros((requests * tokens, heads, rotary), dtype),
            zeros((16, page_size, size + rotary), stored or dtype), zeros(requests + 1, jnp.int32),
            zeros(requests, jnp.int32), zeros((requests, width), jnp.int32), **options,
        )  # fmt: skip
        found.append(bound.call)
        return bound.inputs

    found = []
    jax.eval_shape(make)
    return found[0]


def compiled(call, chosen, capability_number):
    recorder = testing.Recorder()
    specs = {field: getattr(call, field) for field in LatentPagedAttentionInputs._fields}
    arrays = LatentPagedAttentionInputs(**{k: v and jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in specs.items()})
    with intercept_launches(recorder):
        jax.eval_shape(lambda inputs: kernel.forward(call, inputs, chosen), arrays)
    return [(one.kernel.fn.__name__, one.compile(capability_number)) for one in recorder.compilations]


MACHINE = {
    "128 heads": ((128, 4096, 64), {}, (80, 90)),
    "16 heads": ((128, 4096, 64), {"heads": 16}, (80, 90)),
    "few requests, short pages": ((4, 4096, 16), {"heads": 16}, (90,)),
    "float32": ((8, 4096, 64), {"heads": 16, "dtype": "float32"}, (80,)),
}


@needs_jax_triton
@pytest.mark.parametrize(
    ("name", "capability_number"), [(name, number) for name, (*_, numbers) in MACHINE.items() for number in numbers]
)
def test_loops_compile_without_spills(triton_cache, name, capability_number):
    """And a latent that is read once stands once in shared memory, for the scores and for the values."""
    arguments, options, _ = MACHINE[name]
    call, target = shapes_of(*arguments, **options), Target("gpu", "", f"{capability_number // 10}.0")
    chosen = config.heuristic(call, target)
    found = compiled(call, chosen, capability_number)
    assert [kind for kind, _ in found] == ["latent_paged_attention_kernel", "latent_combine_kernel"][: 1 + (chosen.splits > 1)]
    for kind, machine in found:
        taken = testing.resources(machine)
        assert taken.spilling < 0.01, (kind, taken)
        assert taken.shared <= shared_memory_limit(target), (kind, taken)
    ptx = found[0][1].asm["ptx"]
    assert "cp.async.cg.shared.global" in ptx
    assert ("wgmma" in ptx) == (capability_number >= 90 and options.get("dtype") != "float32")


@needs_jax_triton
@pytest.mark.parametrize("capability_number", [80, 90])
@pytest.mark.parametrize("options", [{"tokens": 4}, {"stored": "int8"}, {"heads": 32}], ids=str)
def test_the_search_space_is_small_and_fits(triton_cache, options, capability_number):
    target = Target("gpu", "", f"{capability_number // 10}.0")
    call = shapes_of(8, 4096, 64, **{"heads": 16, **options})
    space = config.search_space(call, target)
    assert space[0] == config.heuristic(call, target) and 4 <= len(space) == len(set(space)) <= 12
    for chosen in {dataclasses.replace(one, splits=1): one for one in space}.values():
        ((_, machine), *_) = compiled(call, chosen, capability_number)
        assert machine.metadata.shared <= shared_memory_limit(target), chosen


@needs_jax_triton
@pytest.mark.parametrize("tokens", [1, 2])
def test_sizes_of_one_compile(triton_cache, tokens):
    """Triton makes constants of integers that are 1."""
    call = shapes_of(1, 1, 1, tokens=tokens, heads=1, size=16, rotary=0)
    call = dataclasses.replace(call, pages=ArraySpec((1, 1, 1, 16), "bfloat16"))
    for chosen in (TILE, dataclasses.replace(TILE, block_q=2, splits=2, keys_first=True)):
        assert len(compiled(call, chosen, 90)) == chosen.splits


def test_splits_fill_the_device_and_are_not_made_for_nothing():
    wide = Problem(queries=128, heads=128, together=1, keys=4096, latent=512, rest=64, itemsize=2, stored=2)
    assert splits_of(wide, H100, 1, 64, 64) == 1  # 256 programs
    assert splits_of(dataclasses.replace(wide, queries=16), H100, 1, 64, 64) == 4  # 128 programs
    assert 16 <= splits_of(dataclasses.replace(wide, queries=1), H100, 1, 64, 64) <= max_splits(wide, 64) == 64
    assert splits_of(dataclasses.replace(wide, queries=1, keys=64), H100, 1, 64, 64) == 1


def test_supports_says_what_is_too_large():
    assert capability.supports_forward(shapes_of(2, 64, 16), H100) is None or version_problem()
    assert "513 channels are above 512" in str(capability.supports_forward(shapes_of(2, 64, 16, size=513), H100))
    assert "129 channels are above 128" in str(capability.supports_forward(shapes_of(2, 64, 16, rotary=129), H100))
    e4m3 = shapes_of(2, 64, 16, stored="float8_e4m3fn")
    assert (
        "no float8_e4m3fn below compute capability 8.9"
        in str(capability.supports_forward(e4m3, Target("gpu", "NVIDIA A100-SXM4-80GB", "8.0")))
        or version_problem()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [({"block_k": 24}, "power of two"), ({"splits": 0}, "splits is 1"), ({"block_q": 0}, "at least 1")],
)
def test_a_config_that_cannot_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TILE, **change)
