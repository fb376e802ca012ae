"""The first questions of every `supports` for NVIDIA GPUs."""

from __future__ import annotations

import pytest

from ejkernel.call import ArraySpec
from ejkernel.plugin import Target
from ejkernel.targets.nvidia import HALVES, GpuProperties, array_problem, device_problem, gpu_properties


@pytest.mark.parametrize(
    ("target", "limits", "reason"),
    [
        (Target("gpu", "NVIDIA H200", "9.0"), {}, None),
        (Target("gpu", "", "8.0"), {}, None),
        (Target("gpu", "", "12.0"), {}, None),
        (Target("gpu", "NVIDIA H200", "9.0"), {"oldest": (9, 0), "newest": (9, 0)}, None),
        (Target("cpu"), {}, "needs an NVIDIA GPU, the target is cpu"),
        (
            Target("gpu", "AMD Instinct MI300X", "gfx942"),
            {},
            "needs an NVIDIA GPU, the target is gpu (AMD Instinct MI300X, gfx942)",
        ),
        (Target("gpu", "", "gfx90a"), {}, "needs an NVIDIA GPU, the target is gpu (gfx90a)"),
        (Target("gpu", "AMD"), {}, "needs an NVIDIA GPU, the target is gpu (AMD)"),
        (Target("gpu", "", "unheard of"), {}, "the compute capability of gpu (unheard of) is unknown"),
        (Target("gpu"), {}, "the compute capability of gpu is unknown; say it with ejkernel.use(target="),
        (Target("gpu", "Tesla T4", "7.5"), {}, "needs compute capability 8.0 or newer, gpu (Tesla T4, sm_75) has 7.5"),
        (
            Target("gpu", "", "10.0"),
            {"oldest": (9, 0), "newest": (9, 0)},
            "needs compute capability 9.0, gpu (sm_100) has 10.0",
        ),
        (Target("gpu", "", "8.6"), {"oldest": (9, 0), "newest": (10, 3)}, "needs compute capability 9.0 to 10.3, "),
    ],
)
def test_devices(target, limits, reason):
    found = device_problem(target, **limits)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_arrays():
    specs = {"cache": ArraySpec((4,), "int8"), "x": ArraySpec((4,), "float32"), "offset": None}
    assert array_problem({"x": specs["x"], "offset": None}) is None
    assert array_problem(specs) == "cache is int8, needs float32, bfloat16, float16"
    assert array_problem(specs, {"cache": ("int8",), "x": HALVES}) == "x is float32, needs bfloat16, float16"


@pytest.mark.parametrize(
    ("capability", "kib", "multiprocessors"),
    [
        ("8.0", 163, 108),
        ("8.6", 99, None),
        ("8.7", 163, None),
        ("8.9", 99, None),
        ("9.0", 227, 132),
        ("10.0", 227, 148),
        ("10.3", 227, None),
        ("12.0", 99, None),
        (None, 99, None),
    ],
)
def test_properties_of_devices(capability, kib, multiprocessors):
    assert gpu_properties(Target("gpu", "", capability)) == GpuProperties(kib * 1024, multiprocessors)
