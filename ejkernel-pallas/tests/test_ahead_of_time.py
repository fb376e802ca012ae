"""The real TPU compiler against what configs believe about VMEM, and the tool's own records."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.call import ArraySpec
from ejkernel.operations.flash_attention.interface import FlashAttentionCall, FlashAttentionInputs, FlashAttentionOutputs
from ejkernel.plugin import Target
from ejkernel.testing.problem import case_named, representative
from ejkernel_pallas import _ahead_of_time as aot, _listings
from ejkernel_pallas._call import MIN_VMEM, compiler_params
from ejkernel_pallas.tpu import _vmem
from ejkernel_pallas.tpu.flash_attention import config, kernel

needs_compiler = pytest.mark.skipif(aot.unavailable() is not None, reason=str(aot.unavailable()))
V6E = Target("tpu", "TPU v6 lite")
ROOT = Path(__file__).parents[2]


def attention(queries, keys, heads, key_heads, size, value_size, dtype, **options):
    shapes = {"query": (1, queries, heads, size), "key": (1, keys, key_heads, size), "value": (1, keys, key_heads, value_size)}
    bias = ArraySpec((1, 1, queries, keys), dtype) if options.pop("bias", False) else None
    specs = {name: ArraySpec(shape, dtype) for name, shape in shapes.items()}
    return FlashAttentionCall(**specs, bias=bias, softmax_scale=0.1, save_residuals=True, **options)


def arrays_of(call, names):
    return {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name in names if (spec := getattr(call, name, None)) is not None
    }


@functools.cache
def device(kind):
    return aot.device_of(kind)


def needed(call, phase, chosen, kind):
    """Bytes of VMEM per kernel, as the compiler counts them."""
    inputs = FlashAttentionInputs(**arrays_of(call, FlashAttentionInputs._fields))
    rows = call.query.shape[:3]
    out = jax.ShapeDtypeStruct((*rows, call.value.shape[3]), call.query.dtype)
    outputs = FlashAttentionOutputs(out, jax.ShapeDtypeStruct(rows, jnp.float32))
    arguments = (inputs,) if phase == "forward" else (inputs, outputs, FlashAttentionOutputs(out))
    run = aot._on(Target("tpu", device(kind).device_kind), getattr(kernel, phase), call, chosen)
    return aot.vmem_of(device(kind), run, *arguments)


@st.composite
def calls(draw):
    sizes = st.sampled_from([8, 64, 96, 128, 256])
    key_heads = draw(st.sampled_from([1, 2]))
    return attention(
        draw(st.integers(1, 3000)),
        draw(st.integers(1, 3000)),
        2 * key_heads,
        key_heads,
        draw(sizes),
        draw(sizes),
        draw(st.sampled_from(["bfloat16", "float32"])),
        causal=draw(st.booleans()),
        logits_soft_cap=draw(st.sampled_from([None, 30.0])),
        bias=draw(st.booleans()),
    )


@needs_compiler
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(call=calls(), kind=st.sampled_from(["v5e", "v6e", "7x"]))
def test_forward_takes_no_more_vmem_than_counted(call, kind):
    target = Target("tpu", device(kind).device_kind)
    chosen = config.forward_heuristic(call, target)
    found = max(needed(call, "forward", chosen, kind).values(), default=MIN_VMEM)
    counted = config.forward_bytes(call, target, chosen)
    assert found <= counted <= _vmem.memory_of(target).vmem, (chosen, found, counted)


@needs_compiler
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(call=calls(), kind=st.sampled_from(["v5e", "v6e", "7x"]))
def test_backward_takes_no_more_vmem_than_counted(call, kind):
    target = Target("tpu", device(kind).device_kind)
    chosen = config.backward_heuristic(call, target)
    found = needed(call, "backward", chosen, kind)
    by_key, by_query = config.backward_bytes(call, target, chosen)
    assert all(name.startswith("ejkernel_flash_attention_backward_") for name in found)
    for name, size in found.items():
        counted = by_key if name.endswith("_key") else by_query
        assert size <= counted <= _vmem.memory_of(target).vmem, (name, chosen, size, counted)


@needs_compiler
@pytest.mark.parametrize("kind", aot.TOPOLOGIES)
def test_a_kernel_may_use_the_whole_limit(kind):
    """The compiler takes a block that with its two buffers fills what the table promises, and refuses twice as much."""
    limit = _vmem.memory_of(Target("tpu", device(kind).device_kind)).vmem

    def copied(rows):
        def copy(r_from, r_to):
            r_to[:8] = r_from[:8]

        block = pl.BlockSpec((rows, 128), lambda i: (i, 0))
        array = jax.ShapeDtypeStruct((4 * rows, 128), jnp.float32)
        params = pltpu.CompilerParams(vmem_limit_bytes=limit)
        call = pl.pallas_call(copy, grid=(4,), in_specs=[block], out_specs=block, out_shape=array, compiler_params=params)
        aot.compile_for(device(kind), call, array)

    rows = limit // (4 * 128 * 4)
    assert 2 * _vmem.buffered_bytes((rows, 128), "float32") <= limit
    copied(rows * 7 // 8 // 8 * 8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        copied(2 * rows)


@needs_compiler
def test_rows_of_a_small_case():
    case = representative("rms_norm")[0]
    rows = list(aot.compiled("rms_norm", [case], ["float32"], ["v6e"]))
    assert [row.phase for row in rows] == ["forward", "backward"]
    assert all(row.problem() is None and not row.refused and row.code > 0 and row.seconds > 0 for row in rows)


@needs_compiler
def test_the_tool_records_what_the_compiler_lists(tmp_path):
    """In processes of its own: libtpu reads only once what it shall list."""
    out = tmp_path / "rows.json"
    options = ("--operation", "rms_norm", "--case", "bench-16384x4096", "--kind", "v6e", "--jobs", "1")
    command = [sys.executable, str(ROOT / "tools" / "tpu_aot.py"), *options, "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    rows = json.loads(out.read_text())["rows"]
    assert [row["phase"] for row in rows] == ["backward", "forward"]
    (forward,) = rows[1]["kernels"].values()
    # Tiles of 64 rows, their results and the scale, and 72 KiB of the compiler's own.
    blocks = 2 * _vmem.buffered_bytes((64, 4096), "bfloat16") + 4096 * 4
    assert blocks <= forward["vmem"] <= blocks + (1 << 17) and forward["bundles"] > 100


def test_listings_are_read_and_removed(tmp_path):
    parts = {
        "00-pre-finalize-registers-and-allocations": "#allocation2 [shape = 'u8[4096]', space=vmem, size = 0x1000, scoped]\n"
        "#allocation3 [shape = 's32[2]', space=sflag, size = 0x8, scoped]\n",
        "01-final_hlo-static-per-bundle-utilization": "== CAPACITY:\nVALU, VLOAD\n 4 2\n== UTILIZATION:\n1 0\n0 2\n0 0\n",
        "03-final_bundles": "{ vst [#allocation9_spill] }\n{ vld [#allocation9_spill] } /* exit: %mine.1 = custom-call(%x) */",
    }
    for name in ("mine.1", "TLP", "fusion.2"):
        for part, text in parts.items():
            (tmp_path / f"17-{name}-{part}.txt").write_text(
                text if name != "fusion.2" else text.replace("custom-call", "fusion")
            )
    assert _listings.taken(tmp_path) == {"mine": _listings.Listing(4096, 3, 4096)}
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_a_refusal_is_recorded_and_a_failure_is_a_problem():
    case = case_named("flash_attention", "unnormalised")
    (row,) = aot.Problem("flash_attention", case, "float32", "forward", "v6e").rows()
    assert "normalize_output" in row.refused and row.problem() is None
    failed = dataclasses.replace(row, refused="", failed="out of memory")
    assert failed.problem() == "flash_attention forward for v6e (unnormalised, float32, heuristic): out of memory"
    table = aot.summary([row, failed])
    assert table[1].split()[3:6] == ["0", "1", "1"]


@needs_compiler
def test_measured_vmem_is_what_blocks_take():
    """A kernel that copies blocks needs their buffers and nothing else."""
    block = pl.BlockSpec((256, 384), lambda i: (i, 0))
    array = jax.ShapeDtypeStruct((1024, 384), jnp.bfloat16)

    def copy(r_from, r_to):
        r_to[...] = r_from[...]

    def run(x):
        params = compiler_params("copied", ("parallel",), _vmem.SMALLEST.vmem)
        return pl.pallas_call(
            copy, grid=(4,), in_specs=[block], out_specs=block, out_shape=array, compiler_params=params, name="copied"
        )(x)

    found = aot.vmem_of(device("v6e"), run, array)
    wanted = 2 * _vmem.buffered_bytes((256, 384), "bfloat16")
    assert wanted <= found["copied"] <= wanted * 1.05


def test_blocks_are_padded_to_register_tiles():
    assert _vmem.block_bytes((8, 128), "float32") == 4096
    assert _vmem.block_bytes((1, 1), "float32") == 4096
    assert _vmem.block_bytes((1, 1), "bfloat16") == 16 * 128 * 2
    assert _vmem.block_bytes((33, 129), "int8") == 64 * 256
    assert _vmem.buffered_bytes((3, 16, 128), "bfloat16") == 2 * 3 * 4096


def test_an_unknown_kind_gets_what_every_kind_has():
    assert _vmem.memory_of(Target("tpu", "TPU v9")) == _vmem.SMALLEST
    assert _vmem.memory_of(Target("tpu", "TPU v6e")) == _vmem.memory_of(V6E)
    assert min(memory.vmem for memory in _vmem.KINDS.values()) == _vmem.SMALLEST.vmem
