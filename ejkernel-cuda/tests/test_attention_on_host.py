"""`flash_attention` in CUDA C++ on this host: its tile scheduler, and the kernel itself against float64.

Fibers stand for threads. TMA loads and wgmma complete as late as the kernel allows, or at random at once; until then their
destinations hold NaN, and a deadlock aborts the program (`host/hopper_on_host.h`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import pathlib
import subprocess

import host_attention
import host_calls
import host_kernels
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from host_attention import Band, MaskParams, Range, TileScheduler

from ejkernel.operations.flash_attention import cases, reference
from ejkernel.operations.flash_attention.interface import OPERATION
from ejkernel.plugin import Target
from ejkernel.testing.problem import fields_refused
from ejkernel_cuda import _library
from ejkernel_cuda._plugin import ejkernel_plugin
from ejkernel_cuda.flash_attention import config, kernel
from ejkernel_cuda.flash_attention.capability import supports_forward

H200 = Target("gpu", "NVIDIA H200", "9.0")
FAR = 1 << 20
LIMITS = {"bfloat16": 4e-3, "float16": 5e-4}
pytestmark = pytest.mark.skipif(host_kernels.missing() is not None, reason=str(host_kernels.missing()))


def seen(queries: int, keys: int, band: Band) -> np.ndarray:
    i, j = np.arange(queries)[:, None], np.arange(keys)[None]
    return (j >= i - band.below) & (j <= i + band.above)


@pytest.mark.parametrize("keys", [1, 5, 11])
def test_tiles_against_all_pairs(keys):
    """The tile range covers all visible pairs and begins and ends with one; `fully_visible_tiles` is exact."""
    library = host_attention.library()
    sides = (-13, -4, -1, 0, 1, 3, 6, FAR)
    for queries, below, above in itertools.product((1, 3, 7, 9), sides, sides):
        band = Band(below, above)
        pairs, mask = seen(queries + 8, keys, band), MaskParams(queries, keys, below, above)
        for block_q, block_k in itertools.product((1, 2, 4), (1, 3, 4)):
            for first in range(0, queries, block_q):
                rows = pairs[first : first + block_q]
                found = library.attention_tiles(mask, first, first + block_q - 1, block_k)
                visible = np.flatnonzero(rows.any(0))
                assert 0 <= found.low <= found.high <= -(-keys // block_k)
                if visible.size:
                    assert (found.low, found.high) == (visible[0] // block_k, visible[-1] // block_k + 1)
                elif below + above >= 0:  # as windows are
                    assert found.high - found.low <= 1
                for whole in (False, True):
                    bare = library.attention_fully_visible(mask, first, first + block_q - 1, block_k, whole)
                    for tile in range(found.low, found.high):
                        all_seen = rows[:, tile * block_k : (tile + 1) * block_k].all()
                        exists = not whole or (tile + 1) * block_k <= keys
                        assert (bare.low <= tile < bare.high) == (exists and all_seen)


def test_every_block_is_worked_on_once():
    library = host_attention.library()
    for blocks, heads, batch, l2_group, reverse_blocks in itertools.product(
        (1, 3, 4), (1, 2, 6), (1, 3), range(1, 19), (False, True)
    ):
        rows, total = heads * batch, blocks * heads * batch
        l2_group = min(l2_group, rows)
        scheduler = TileScheduler(blocks, heads, batch, l2_group, reverse_blocks)
        coords = [library.attention_coord(scheduler, work) for work in range(total)]
        assert sorted((coord.row, coord.block) for coord in coords) == sorted(itertools.product(range(rows), range(blocks)))
        l2_groups = [coord.row // l2_group for coord in coords]
        assert l2_groups == sorted(l2_groups)
        if l2_group == rows:
            order_of_blocks = [coord.block for coord in coords]
            assert order_of_blocks == sorted(order_of_blocks, reverse=reverse_blocks)


def test_ctas_share_work_evenly():
    library = host_attention.library()
    for ctas, total in itertools.product((1, 2, 3, 7), (1, 3, 7, 20, 21, 22)):
        waves = -(-total // ctas)
        dealt = [[library.attention_work(i, ctas, r) for r in range(waves)] for i in range(ctas)]
        assert sorted(work for mine in dealt for work in mine if work < total) == list(range(total))
        # Work that shrinks from one to the next: two waves give everybody the same.
        if waves % 2 == 0 and total == waves * ctas:
            assert len({sum(mine) for mine in dealt}) == 1


def test_stream_k_is_even():
    """Every tile of the split blocks has one owner, and lies in the segment that the combine kernel reads."""
    library, long = host_attention.library(), ctypes.c_int64
    for total, ctas, tiles, low in itertools.product((1, 2, 5, 7, 12, 29), (1, 3, 7, 12), (0, 1, 3, 4, 9, 40), (0, 5)):
        stream_k = library.attention_stream_k(long(total), long(ctas), Range(low, low + tiles))
        if not stream_k.blocks:
            assert stream_k.first == total and min(ctas, total % ctas * tiles // 4) <= total % ctas
            continue
        assert (stream_k.first, stream_k.waves) == (total // ctas * ctas, total // ctas)
        assert stream_k.first + stream_k.blocks == total and stream_k.blocks < stream_k.ctas <= ctas
        segments = {
            (cta, number): library.attention_segment(stream_k, cta, number)
            for cta, number in itertools.product(range(ctas), range(3))
        }
        had = [
            (segment.block * tiles + tile - low, owner, number)
            for (owner, number), segment in segments.items()
            for tile in range(segment.tiles.low, segment.tiles.high)
        ]
        assert sorted(tile for tile, _, _ in had) == list(range(stream_k.blocks * tiles))
        for tile, owner, number in had:
            assert library.attention_owner(stream_k, tile) == owner
            assert library.attention_segment_in(stream_k, owner, tile // tiles) == number
        sizes = [sum(had_by == cta for _, had_by, _ in had) for cta in range(stream_k.ctas)]
        assert max(sizes) - min(sizes) <= 1 and max(sizes) <= tiles and min(sizes) >= 4


def test_sections_hold_whole_groups():
    library, long = host_attention.library(), ctypes.c_int64
    for blocks, rows, group, size in itertools.product((1, 4, 64), (4, 8, 64), (1, 2, 4), (1 << 10, 1 << 20, 1 << 26)):
        l2_group = library.attention_l2_group(*map(long, (blocks, rows, group, size, 132)))
        assert 1 <= l2_group <= rows and (l2_group == rows or l2_group % group == 0)
        assert l2_group * blocks >= min(132, rows * blocks)


def random(rng: np.random.Generator, *shape: int, dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def exact(query, key, value, band, scale, cap=0.0):
    """Output and log-sum-exp in float64; values that are not finite count as 0, as do the keys."""
    query, key, value = (np.where(np.isfinite(x), x, 0) for x in (np.asarray(x, np.float64) for x in (query, key, value)))
    key, value = (np.repeat(x, query.shape[2] // key.shape[2], 2) for x in (key, value))
    logits = scale * np.einsum("bthd,bshd->bhts", query, key)
    logits = cap * np.tanh(logits / cap) if cap else logits
    logits = np.where(seen(query.shape[1], key.shape[1], band), logits, -np.inf)
    largest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isinf(largest), 0, largest))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.moveaxis((np.log(total) + np.where(np.isinf(largest), 0, largest))[..., 0], 1, 2)
    return np.einsum("bhts,bshv->bthv", weights / np.where(total == 0, 1, total), value), lse


def compare(got, wanted, dtype):
    (out, lse), (exact_out, exact_lse) = got, wanted
    np.testing.assert_array_equal(np.isinf(lse), np.isinf(exact_lse))
    there = np.isfinite(exact_lse)
    np.testing.assert_allclose(lse[there], exact_lse[there], rtol=1e-5, atol=1e-5)
    out = np.asarray(out, np.float64)
    assert np.linalg.norm(out - exact_out) <= LIMITS[dtype] * np.linalg.norm(exact_out)
    assert not out[~there].any()


BANDS = {
    "full": (FAR, FAR),
    "causal": (FAR, 0),
    "bottom-right": (FAR, 47),
    "window": (70, 33),
    "causal-window": (129, 0),
    "late": (-100, 250),
    "nothing-first": (FAR, -150),
}
SIZES = [64, 128, 256]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("ping_pong", "persistent"), [(True, True), (False, False)])
def test_numbers(size, band, ping_pong, persistent):
    """Several query blocks with tails, so that the pipeline wraps around, and empty blocks between others."""
    rng, dtype, limits = np.random.default_rng(5), "bfloat16", Band(*BANDS[band])
    queries, keys = (430, 500) if size == 64 else (300, 467)
    query, key, value = (random(rng, 1, n, heads, size, dtype=dtype) for n, heads in ((queries, 2), (keys, 1), (keys, 1)))
    knobs = {"ping_pong": ping_pong, "persistent": persistent, "scale": size**-0.5}
    got = host_attention.forward(query, key, value, limits, **knobs)
    compare(got, exact(query, key, value, limits, size**-0.5), dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("blocks", "keys", "sms", "split_kv_ctas"),
    [(3, 1400, 4, 6), (3, 1400, 5, 6), (2, 1400, 3, 6), (1, 1400, 5, 6), (1, 1400, 9, 6), (1, 3300, 9, 9)],
)
def test_split_blocks(size, blocks, keys, sms, split_kv_ctas):
    """The last blocks are combined from up to six partial results: after full waves, or with fewer blocks than CTAs. The largest
    logits lie in later segments, and queries end within a block."""
    rng, queries = np.random.default_rng(10), blocks * (192 if size == 64 else 128) - 41
    shapes = ((1, queries, 2, size), (1, keys, 1, size), (1, keys, 1, size))
    query, key, value = (random(rng, *shape, dtype="bfloat16") for shape in shapes)
    key *= np.linspace(0.2, 3, keys)[:, None, None].astype(key.dtype)
    knobs = {"ping_pong": size == 64, "persistent": True, "scale": size**-0.5, "sms": sms}
    wanted = exact(query, key, value, Band(FAR, FAR), size**-0.5)
    alone = host_attention.forward(query, key, value, Band(FAR, FAR), **knobs)
    shared = host_attention.forward(query, key, value, Band(FAR, FAR), split_kv_ctas=split_kv_ctas, **knobs)
    compare(shared, wanted, "bfloat16")
    assert (shared[1] != alone[1]).any()  # sums in another order


@pytest.mark.parametrize("pack", [1, 4, 8])
def test_split_blocks_of_packed_heads(pack):
    rng = np.random.default_rng(11)
    query, key = random(rng, 2, 13, 16, 128, dtype="float16"), random(rng, 2, 1100, 2, 128, dtype="float16")
    value = random(rng, 2, 1100, 2, 40, dtype="float16")
    knobs = {"ping_pong": False, "persistent": True, "scale": 0.1, "cap": 0.0, "pack": pack}
    got = host_attention.forward(query, key, value, Band(FAR, FAR), split_kv_ctas=200, sms=11, **knobs)
    compare(got, exact(query, key, value, Band(FAR, FAR), 0.1), "float16")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("band", [Band(FAR, 1150), Band(300, 900), Band(FAR, 0), Band(FAR, -290), Band(-400, FAR)])
def test_split_blocks_under_masks(size, band):
    """Pieces of which a block sees no key, blocks that see none, and values there that are not finite."""
    rng = np.random.default_rng(12)
    query, key, value = (random(rng, 1, n, 2, size, dtype="bfloat16") for n in (450, 1500, 1500))
    value[:, ~seen(450, 1500, band).any(0)] = np.inf
    knobs = {"ping_pong": False, "persistent": True, "scale": 0.1, "sms": 9, "split_kv_ctas": 9}
    got = host_attention.forward(query, key, value, band, **knobs)
    compare(got, exact(query, key, value, band, 0.1), "bfloat16")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("heads", "key_heads", "pack"), [(8, 1, 8), (12, 2, 2), (64, 1, 64)])
@pytest.mark.parametrize("band", ["window", "causal-window", "nothing-first"])
def test_packed_heads(size, heads, key_heads, pack, band):
    rng, limits = np.random.default_rng(9), Band(*BANDS[band])
    shapes = ((2, 37, heads, size), (2, 150, key_heads, size), (2, 150, key_heads, size))
    query, key, value = (random(rng, *shape, dtype="bfloat16") for shape in shapes)
    value[:, ~seen(37, 150, limits).any(0)] = np.nan
    knobs = {"ping_pong": size < 128, "persistent": size > 64, "scale": size**-0.5}
    got = host_attention.forward(query, key, value, limits, pack=pack, **knobs)
    compare(got, exact(query, key, value, limits, size**-0.5), "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("size", "value_size"), [(8, 64), (40, 24), (96, 128), (72, 8), (192, 128), (136, 256)])
def test_heads_of_other_sizes(size, value_size, dtype):
    """TMA zero-fills columns past the end of a head, and does not store them into the next head."""
    rng = np.random.default_rng(6)
    query, key = random(rng, 2, 131, 4, size, dtype=dtype), random(rng, 2, 150, 2, size, dtype=dtype)
    value = random(rng, 2, 150, 2, value_size, dtype=dtype)
    band = Band(FAR, 19)
    got = host_attention.forward(query, key, value, band, scale=0.2, ping_pong=True, persistent=True)
    compare(got, exact(query, key, value, band, 0.2), dtype)


@pytest.mark.parametrize(("scale", "cap"), [(0.1, 5.0), (-0.1, 0.0), (0.0, 0.0), (4.0, 0.0), (-0.3, 2.0)])
def test_logits(scale, cap):
    rng = np.random.default_rng(7)
    query, key, value = (random(rng, 1, n, 1, 64, dtype="bfloat16") for n in (70, 140, 140))
    got = host_attention.forward(query, key, value, Band(FAR, 3), scale=scale, cap=cap, ping_pong=True, persistent=True)
    compare(got, exact(query, key, value, Band(FAR, 3), scale, cap), "bfloat16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masked_keys_and_values_may_be_nonfinite(bad, dtype):
    """Keys that no query sees, and values that some queries do not see."""
    rng, band = np.random.default_rng(8), Band(40, 9)
    query, key, value = (random(rng, 1, n, 1, 128, dtype=dtype) for n in (200, 400, 400))
    key[:, 209:] = bad
    value[:, 190:, :, 3::2] = bad
    value[:, :10] = bad
    got = host_attention.forward(query, key, value, band, scale=0.09, ping_pong=True, persistent=True)
    compare(got, exact(query, key, value, band, 0.09), dtype)


def test_finite_values_stay_as_they_are():
    """The largest and smallest finite numbers of a dtype do not count as nonfinite."""
    for dtype, largest in (("bfloat16", 3.3895e38), ("float16", 65504.0)):
        value = np.zeros((1, 128, 1, 64), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        value[0, 0] = np.array([largest, -largest, 2**-14, 0.0] * 16)
        key = np.zeros_like(value)
        out, _ = host_attention.forward(key[:, :1], key, value, Band(0, 0), scale=1.0, ping_pong=False, persistent=False)
        np.testing.assert_array_equal(out[0, 0, 0], value[0, 0, 0])


def bound(case, dtype):
    arrays = case.arrays(np.random.default_rng(7))
    made = {name: jnp.asarray(value, dtype if value.dtype == np.float32 else None) for name, value in arrays.items()}
    problem = OPERATION.canonicalise(**made, **case.options)
    return dataclasses.replace(problem.call, save_residuals=True), problem.inputs


@pytest.mark.skipif(not _library.PATH.is_file(), reason="build the library: pip install with nvcc 13")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in cases.CASES if not case.is_benchmark])
def test_cases(case, dtype, monkeypatch):
    """Core's named cases: every one that `supports` admits, by every config, through the handler's own checks."""
    monkeypatch.setattr(jax.ffi, "ffi_call", host_calls.answered)
    monkeypatch.setattr(kernel, "handler", lambda name: name)
    call, inputs = bound(case, dtype)
    unknown = fields_refused(ejkernel_plugin(), "flash_attention", call)
    reason = f"does not accept {unknown}" if unknown else supports_forward(call, H200)
    if reason is not None:
        assert not case.name.startswith(tuple(PLAIN.split())) or (dtype == "float16" and "soft" in case.name), reason
        return
    wide = type(inputs)(*(None if x is None else np.asarray(x, np.float64) for x in inputs))
    wanted = reference.forward(call, wide)
    for choice in config.forward_space(call, H200):
        got = kernel.forward(call, inputs, choice)
        if wanted.out.size:
            compare((got.out, np.asarray(got.lse)), wanted, dtype)
        assert got.out.shape == wanted.out.shape and got.lse.shape == wanted.lse.shape


PLAIN = "plain tails gqa mqa causal bottom-right window value-size head-size scale lse no- one-"


def encoded(tmp_path, *, driver=True, result=0):
    """The arguments of cuTensorMapEncodeTiled for TMA boxes of 16 tokens of 4 heads, and its error."""
    built = tmp_path / "tensor_map.so"
    folder = pathlib.Path(__file__).parent
    includes = [f"-I{path}" for path in (folder.parent / "csrc", jax.ffi.include_dir(), host_kernels.cuda_headers())]
    command = [
        "g++",
        "-std=c++20",
        "-fno-gnu-unique",
        "-shared",
        "-fPIC",
        *includes,
        "-o",
        built,
        folder / "host" / "tensor_map.cc",
    ]
    subprocess.run(command, check=True)
    facts, message = (ctypes.c_uint64 * 16)(), ctypes.create_string_buffer(300)
    sizes = map(ctypes.c_int64, (96, 1000, 8, 3))
    flags = ctypes.c_bool(driver), result, ctypes.c_bool(True)
    failed = ctypes.CDLL(str(built)).make_tensor_map(
        *flags, ctypes.c_void_p(1 << 40), *sizes, 16, 4, facts, message, ctypes.c_int64(300)
    )
    return failed, list(facts)[:13], message.value.decode()


def test_tensor_map_arguments(tmp_path):
    """[3, 1000, 8, 96]: columns, heads, tokens, batch; ascending strides in bytes; TMA boxes of tokens and heads."""
    failed, facts, _ = encoded(tmp_path)
    assert not failed
    assert facts == [1, 1 << 40, *(96, 8, 1000, 3), *(192, 1536, 1536000), *(64, 4, 16, 1)]


def test_errors_of_the_driver(tmp_path):
    failed, _, message = encoded(tmp_path, result=1)
    assert (
        failed
        and message == "ejkernel_cuda test: the driver refuses to describe [3, 1000, 8, 96] in TMA boxes of 16 x 4 (error 1)"
    )


def test_without_a_driver(tmp_path):
    failed, _, message = encoded(tmp_path, driver=False)
    assert failed and "NVIDIA's driver has no cuTensorMapEncodeTiled" in message
