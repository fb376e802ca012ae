"""`flash_attention` in CUDA C++ on a machine without a GPU: the handler's checks, refusals, configs, lowering and machine code."""

from __future__ import annotations

import itertools

import disassembly
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_calls import check_target

import ejkernel
from ejkernel.operations.flash_attention.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel.testing.problem import fields_refused
from ejkernel_cuda import _library
from ejkernel_cuda._plugin import ejkernel_plugin
from ejkernel_cuda.flash_attention import capability, config, kernel

H200 = Target("gpu", "NVIDIA H200", "9.0")
needs_library = pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")
ARRAYS = {"query": (2, 5, 4, 64), "key": (2, 7, 2, 64), "value": (2, 7, 2, 128)}
ATTRIBUTES = {
    "below": 12,
    "above": 0,
    "scale": 0.1,
    "cap": 0.0,
    "pack": 1,
    "ping_pong": True,
    "persistent": True,
}


def check(
    dtype=jnp.bfloat16, dtypes=None, out=None, out_dtype=None, lse=None, partial=(0, 2, 128, 128), partial_stats=None, **changes
):
    """The handler's checks on these shapes."""
    shapes = [changes.pop(name, shape) for name, shape in ARRAYS.items()]
    attributes = {**ATTRIBUTES, **changes}
    floats = {name: np.float32(attributes.pop(name)) for name in ("scale", "cap")}
    flags = {name: attributes.pop(name) for name in ("ping_pong", "persistent")}
    whole = {name: np.int64(value) for name, value in attributes.items()}
    results = (
        jax.ShapeDtypeStruct(out or (*shapes[0][:3], shapes[2][-1]), out_dtype or dtype),
        jax.ShapeDtypeStruct(shapes[0][:3] if lse is None else lse, jnp.float32),
        jax.ShapeDtypeStruct(partial, jnp.float32),
        jax.ShapeDtypeStruct((*partial[:-1], 2) if partial_stats is None else partial_stats, jnp.float32),
    )
    arrays = [jnp.zeros(shape, each) for shape, each in zip(shapes, dtypes or (dtype,) * 3, strict=True)]
    call = jax.ffi.ffi_call(check_target("flash_attention_forward"), results)
    return jax.block_until_ready(call(*arrays, **whole, **floats, **flags))


@needs_library
def test_handler_admits_the_contract():
    check()
    check(jnp.float16, lse=(0,))
    check(query=(2, 5, 4, 200), key=(2, 7, 1, 200), value=(2, 7, 1, 8), partial=(3, 2, 128, 256), cap=30.0, below=-(1 << 30))
    check(pack=2)
    check(query=(2, 5, 128, 64), key=(2, 7, 2, 64), pack=64)
    check(query=(0, 5, 4, 64), key=(0, 7, 2, 64), value=(0, 7, 2, 64), partial=(0, 2, 192, 64))
    check(value=(2, 7, 2, 64), partial=(132, 2, 192, 64))


@needs_library
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": jnp.float32}, "query must be bfloat16 or float16"),
        ({"dtypes": (jnp.bfloat16, jnp.bfloat16, jnp.float16)}, "key and value must have the query's type"),
        ({"query": (5, 4, 64)}, r"query must be \[batch, queries, heads, size\], got \[5, 4, 64\]"),
        ({"key": (1, 7, 2, 64)}, r"key must be .* for query \[2, 5, 4, 64\], got \[1, 7, 2, 64\]"),
        ({"key": (2, 7, 2, 72)}, r"key must be .* got \[2, 7, 2, 72\]"),
        ({"value": (2, 8, 2, 64)}, r"value must be .* for key \[2, 7, 2, 64\], got \[2, 8, 2, 64\]"),
        ({"key": (2, 7, 3, 64), "value": (2, 7, 3, 64)}, r"heads of query \[2, 5, 4, 64\] must be a multiple"),
        ({"key": (2, 0, 2, 64), "value": (2, 0, 2, 64)}, "key must have tokens"),
        ({"value": (2, 7, 2, 60)}, "head sizes must be multiples of 8 up to 256, got 60"),
        ({"value": (2, 7, 2, 264)}, "head sizes must be multiples of 8 up to 256, got 264"),
        *(({"pack": pack}, f"pack must be a power of two up to 64 that divides the 2 .* got {pack}") for pack in (0, 3, 4)),
        ({"pack": 128, "query": (2, 5, 256, 64)}, "pack must be .* got 128"),
        ({"below": 1 << 31}, r"below and above must be within 2\^30"),
        ({"cap": -1.0}, "cap must not be negative"),
        ({"cap": float("nan")}, "cap must not be negative"),
        ({"cap": 3.0, "dtype": jnp.float16}, "cap needs bfloat16"),
        ({"out": (2, 5, 4, 64)}, r"out must be .* got \[2, 5, 4, 64\]"),
        ({"out_dtype": jnp.float16}, "out must be"),
        ({"lse": (2, 4, 5)}, r"lse must be .* or \[0\], got \[2, 4, 5\]"),
        (
            {"partial": (132, 2, 192, 64)},
            r"partial must be \[CTAs, 2, 128, 128\] with up to 2\^16 CTAs, got \[132, 2, 192, 64\]",
        ),
        ({"partial": ((1 << 16) + 1, 2, 128, 128)}, "partial must be .* with up to"),
        ({"partial": (2, 128, 128)}, r"partial must be .* got \[2, 128, 128\]"),
        ({"partial": (3, 2, 128, 128), "partial_stats": (2, 2, 128, 2)}, "partial_stats must be the first axes of partial"),
    ],
)
def test_handler_refuses(changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        check(**changes)


def problem(queries=256, keys=None, heads=4, key_heads=2, size=128, value_size=None, dtype="bfloat16", batch=1, **options):
    keys = keys or queries
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape in (
            (batch, queries, heads, size),
            (batch, keys, key_heads, size),
            (batch, keys, key_heads, value_size or size),
        )
    ]
    return OPERATION.canonicalise(*arrays, **options)


NOT_ACCEPTED = [
    ({"bias": np.zeros((1, 1, 256, 256), np.float32)}, {"bias"}),
    ({"mask": np.ones((1, 1, 256, 256), bool)}, {"mask"}),
    ({"softmax_aux": np.zeros(4, np.float32)}, {"softmax_aux"}),
    (
        {"query_segments": np.zeros((1, 256), np.int32), "key_segments": np.zeros((1, 256), np.int32)},
        {"query_segments", "key_segments"},
    ),
    ({"key_lengths": np.array([3], np.int32)}, {"query_segments", "key_segments"}),
    ({"query_positions": np.zeros((1, 256), np.int32), "causal": True}, {"query_positions"}),
    ({"chunk_size": 32}, {"chunk_size"}),
    ({"dropout_prob": 0.1, "dropout_seed": 1}, {"dropout_rate", "dropout_streams"}),
    ({"normalize_output": False}, {"normalize_output"}),
    ({"logits_dtype": "bfloat16"}, {"logits_dtype"}),
]


@pytest.mark.parametrize(("options", "fields"), NOT_ACCEPTED, ids=lambda value: "-".join(sorted(value)))
def test_fields_that_it_does_not_accept(options, fields):
    assert fields_refused(ejkernel_plugin(), "flash_attention", problem(**options).call) == fields


REFUSED = [
    ({"causal": True, "prefix": 10}, "prefix is 10"),
    ({"dtype": "float16", "logits_soft_cap": 3.0}, "logits_soft_cap is 3.0 with float16"),
    ({"size": 264}, "the query's head size is 264, needs 1 ... 256"),
    ({"queries": 2**27 + 1}, "134217729 tokens"),
    ({"queries": 2**20, "batch": 2**10, "heads": 2**7}, "blocks, more than 1073741824"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refuses(options, reason):
    assert reason in capability.supports_forward(problem(**options).call, H200)


@needs_library
def test_supports():
    for options in ({}, {"causal": True}, {"sliding_window": (3, None)}, {"size": 37, "value_size": 250}, {"dtype": "float16"}):
        assert capability.supports_forward(problem(**options).call, H200) is None
    assert capability.supports_forward(problem(causal=True, logits_soft_cap=20.0, return_lse=True).call, H200) is None
    call = problem().call
    for name, version in (("A100", "8.0"), ("B200", "10.0"), ("RTX", "12.0")):
        reason = capability.supports_forward(call, Target("gpu", name, version))
        assert reason.startswith("needs compute capability 9.0 (Hopper)") and reason.endswith(version)
    assert "the target is tpu" in capability.supports_forward(call, Target("tpu", "TPU v5e"))
    assert "query is float32" in capability.supports_forward(problem(dtype="float32").call, H200)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (522, 522)),
        ({"causal": True}, (522, 0)),
        ({"causal": True, "causal_alignment": "bottom_right"}, (522, 10)),
        ({"sliding_window": (3, 7)}, (3, 7)),
        ({"sliding_window": (3, 7), "causal": True}, (3, 0)),
        ({"sliding_window": (10**12, None)}, (522, 522)),
        ({"sliding_window": (3, 7), "causal": True, "causal_alignment": "bottom_right"}, (-7, 10)),
    ],
)
def test_bands(options, expected):
    """Of 256 queries and 266 keys."""
    assert config.band(problem(keys=266, **options).call) == expected


def test_configs():
    calls = {size: problem(size=size, causal=True).call for size in (8, 64, 72, 128, 136, 256)}
    assert not any(config.forward_heuristic(call, H200).persistent for call in calls.values())
    assert config.forward_heuristic(problem().call, H200).persistent
    assert {len(config.forward_space(call, H200)) for call in calls.values()} == {4}
    narrow = config.forward_heuristic(problem(size=64, causal=True, sliding_window=(127, 0)).call, H200)
    assert narrow.pack_gqa and narrow.persistent and not narrow.ping_pong
    assert config.forward_heuristic(problem(queries=3, keys=500).call, H200).pack_gqa
    assert not config.forward_heuristic(problem(queries=3, keys=500, heads=2).call, H200).pack_gqa
    groups = {heads: config.packed_heads(problem(heads=heads, key_heads=1).call) for heads in (1, 7, 12, 64, 128)}
    assert groups == {1: 1, 7: 1, 12: 4, 64: 64, 128: 64}
    for call in calls.values():
        assert config.forward_heuristic(call, H200) in config.forward_space(call, H200)


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({"queries": 8192, "heads": 16, "key_heads": 16, "batch": 2}, True),  # 2048 blocks are 15 rounds and 68 more
        ({"queries": 8448, "heads": 30, "key_heads": 30}, False),  # 15 whole rounds
        (
            {"queries": 8192, "heads": 16, "key_heads": 16, "batch": 2, "causal": True},
            False,
        ),  # the hardware schedules whole blocks
        ({"queries": 2048, "heads": 8, "key_heads": 8, "causal": True}, False),  # 128 blocks, half of whose tiles are masked
        ({"queries": 1, "keys": 131072, "heads": 32, "key_heads": 8}, True),
        ({"queries": 256, "keys": 32768, "causal": True, "causal_alignment": "bottom_right"}, True),
        (
            {"queries": 256, "keys": 32768, "sliding_window": (255, 0), "causal": True, "causal_alignment": "bottom_right"},
            False,
        ),
        ({"queries": 1, "keys": 1024, "heads": 32, "key_heads": 8}, False),  # too few tiles to be worth it
    ],
)
def test_split_kv_of_the_last_wave(options, shared):
    """If that shortens the last or only wave by more than it costs."""
    call = problem(**options).call
    chosen, space = config.forward_heuristic(call, H200), config.forward_space(call, H200)
    assert chosen.split_kv_ctas == (132 if shared else 0) and chosen in space
    assert not shared or chosen.persistent
    assert {one.split_kv_ctas for one in space if not one.persistent} == {0}


def test_split_kv_needs_persistent():
    with pytest.raises(ValueError, match="split_kv_ctas must not be negative, and must be 0 unless persistent=True"):
        config.ForwardConfig(ping_pong=False, persistent=False, split_kv_ctas=4)


@needs_library
def test_lowers_for_cuda():
    """Forward is ours, backward another platform's, which reads our output and log-sum-exp."""

    def loss(query, key, value):
        return ejkernel.flash_attention(query, key, value, causal=True, platform=("cuda", "xla")).astype(jnp.float32).sum()

    arguments = [jax.ShapeDtypeStruct((2, 256, heads, 100), jnp.bfloat16) for heads in (4, 2, 2)]
    with ejkernel.use(target=H200):
        text = jax.jit(jax.grad(loss)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert text.count("@ejkernel_cuda_flash_attention_forward") == 1
    assert "ejkernel.flash_attention[cuda]" in text and "ejkernel.flash_attention.backward[xla]" in text


@needs_library
def test_no_visible_pair_needs_no_kernel():
    query, key, value = (jnp.ones((1, length, heads, 128), jnp.bfloat16) for length, heads in ((5, 4), (0, 2), (0, 2)))
    bound = OPERATION.canonicalise(query, key, value, return_lse=True)
    got = kernel.forward(bound.call, bound.inputs, config.forward_heuristic(bound.call, H200))
    assert got.out.shape == (1, 5, 4, 128) and not np.asarray(got.out, np.float32).any()
    assert got.lse.shape == (1, 5, 4) and np.isneginf(got.lse).all()


@needs_library
@pytest.mark.skipif(disassembly.tool() is None, reason="needs cuobjdump and nvdisasm on the PATH or in Triton's package")
def test_machine_code():
    """No register spills; wgmmas are issued back to back and overlap the exponentials."""
    found = disassembly.kernels()
    if not found:
        pytest.skip("needs a library with code for sm_90a")
    assert sorted((one.dtype, one.size) for one in found) == sorted(itertools.product(("bfloat16", "half"), (64, 128, 256)))
    assert {f"{one.dtype} {one.size}": one.problems() for one in found if one.problems()} == {}
