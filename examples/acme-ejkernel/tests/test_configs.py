"""What is this platform's own and not in the conformance suite: its configs and its refusals."""

import pytest

from acme_ejkernel.rms_norm.capability import supports
from acme_ejkernel.rms_norm.configs import RowBlocks, heuristic, search_space
from ejkernel.call import ArraySpec
from ejkernel.operations.rms_norm.interface import RmsNormCall
from ejkernel.plugin import Target

CPU = Target("cpu")


def call(*shape: int, dtype: str = "float32") -> RmsNormCall:
    return RmsNormCall(x=ArraySpec(shape, dtype))


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((1, 8), 1), ((3, 5, 64), 16), ((4096, 4096), 16), ((100_000, 128), 512), ((0, 16), 1), ((2, 1 << 20), 1)],
)
def test_heuristic(shape, rows):
    assert heuristic(call(*shape), CPU) == RowBlocks(rows)


def test_search_space_holds_the_heuristic_and_more():
    assert search_space(call(64, 4096), CPU) == tuple(map(RowBlocks, (1, 4, 16, 64)))
    assert search_space(call(0, 16), CPU) == (RowBlocks(1),)


def test_refusals():
    assert supports(call(4, 8, dtype="float64"), CPU) == (
        "x is float64; acme computes in float32 and takes float32, bfloat16, float16"
    )
    assert supports(call(4, 0), CPU) == "x has no elements along the normalised axis"
    assert supports(call(4, 8), CPU) is None


def test_config_without_rows():
    with pytest.raises(ValueError, match="rows: got 0"):
        RowBlocks(0)
