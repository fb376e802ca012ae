"""`grouped_matmul` compiled for a Hopper GPU that is not there: products stay in flight, and nothing leaves registers."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from test_mosaic_gpu_flash_attention_compiled import DESCRIPTION, HOPPER, SERIALISED, pytestmark

from ejkernel.call import ArraySpec
from ejkernel.operations.grouped_matmul.interface import GroupedMatmulCall, GroupedMatmulInputs, GroupedMatmulOutputs
from ejkernel_pallas.mosaic_gpu.grouped_matmul import config, kernel

__all__ = ("pytestmark",)


@pytest.mark.parametrize(("rows", "scaled"), [(8192, False), (64, True)], ids=["training", "decode with scales"])
def test_products_stay_in_flight(
    rows: int, scaled: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    device = topologies.get_topology_desc(platform="cuda", target_config=DESCRIPTION, topology="1x1x1").devices[0]
    groups, inner, columns = 8, 4096, 14336
    inputs = GroupedMatmulInputs(
        lhs=ArraySpec((1, rows, inner), "bfloat16"),
        rhs=ArraySpec((1, groups, inner, columns), "bfloat16"),
        group_sizes=ArraySpec((1, groups), "int32"),
        rhs_scale=ArraySpec((1, groups, columns), "float32") if scaled else None,
    )
    call = GroupedMatmulCall(**inputs._asdict(), preferred_element_type="bfloat16")

    def placed(spec: ArraySpec) -> Any:
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=SingleDeviceSharding(device))

    arrays = GroupedMatmulInputs(*(None if spec is None else placed(spec) for spec in inputs))
    grad = GroupedMatmulOutputs(placed(ArraySpec((1, rows, columns), "bfloat16")))
    forward, backward = config.forward_heuristic(call, HOPPER), config.backward_heuristic(call, HOPPER)
    jax.jit(lambda i: kernel.forward(call, i, forward)).lower(arrays).compile()
    jax.jit(lambda i, g: kernel.backward(call, i, g, g, backward)).lower(arrays, grad).compile()
    check(capfd, kernels=3)


@pytest.mark.parametrize("rows", [8192, 64], ids=["training", "decode"])
def test_float8_with_its_second_set_of_sums_stays_in_registers(
    rows: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heuristic's tile, and in training the widest of the search space, with everything that is applied to sums."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    device = topologies.get_topology_desc(platform="cuda", target_config=DESCRIPTION, topology="1x1x1").devices[0]
    groups, inner, columns = 8, 7168, 4096
    inputs = GroupedMatmulInputs(
        lhs=ArraySpec((1, rows, inner), "float8_e4m3fn"),
        rhs=ArraySpec((1, groups, columns, inner), "float8_e5m2" if rows == 64 else "float8_e4m3fn"),
        group_sizes=ArraySpec((1, groups), "int32"),
        rhs_scale=ArraySpec((1, groups, columns), "float32"),
        bias=ArraySpec((1, groups, columns), "float32"),
        lhs_scale=ArraySpec((1, rows), "float32"),
    )
    dtype = "float32" if rows == 64 else "bfloat16"
    call = GroupedMatmulCall(**inputs._asdict(), preferred_element_type=dtype, transpose_rhs=True)
    placed = SingleDeviceSharding(device)
    arrays = GroupedMatmulInputs(
        *(None if s is None else jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype), sharding=placed) for s in inputs)
    )
    tiles = [config.forward_heuristic(call, HOPPER)]
    if rows > 64:
        tiles += [tile for tile in config.forward_space(call, HOPPER) if tile.cluster > 1 and tile.block_n == 192][:1]
        assert [tile.sums for tile in tiles] == [config.MAX_PROMOTED_SUMS] * 2
    for tile in tiles:
        jax.jit(lambda i, tile=tile: kernel.forward(call, i, tile)).lower(arrays).compile()
    grad = GroupedMatmulOutputs(jax.ShapeDtypeStruct((1, rows, columns), jnp.dtype(dtype), sharding=placed))
    both = config.backward_heuristic(call, HOPPER)
    jax.jit(lambda i, g: kernel.backward(call, i, g, g, both)).lower(arrays, grad).compile()
    check(capfd, kernels=len(tiles) + (5 if dtype == "float32" else 4))


def check(capfd: pytest.CaptureFixture[str], *, kernels: int) -> None:
    said = capfd.readouterr()
    report = said.out + said.err
    assert not [remark for remark in SERIALISED if remark in report]
    assert len(re.findall(r"Compiling entry function 'grouped_matmul_\w+'", report)) == kernels
    assert {*re.findall(r"(\d+) bytes spill stores", report)} == {"0"}
