"""Import paths of older versions: they resolve, warn with the public name, and cost nothing until they are used."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import ejkernel
from ejkernel import kernels, loggings, masks, packing
from ejkernel._plugins.catalog import FUNCTIONS


@pytest.mark.parametrize("folder", sorted(kernels.PLATFORMS))
def test_every_public_function_on_every_platform(folder: str):
    platform = kernels.PLATFORMS[folder]
    module: Any = importlib.import_module(f"ejkernel.kernels.{folder}")
    assert {*FUNCTIONS} <= {*module.__all__}
    for kernel, names in kernels.FOLDERS.items():
        own: Any = importlib.import_module(f"ejkernel.kernels.{folder}.{kernel}")
        for former, public in names.items():
            message = rf"is now ejkernel\.{public}\(\.\.\., platform='{platform}'\)$"
            with pytest.warns(DeprecationWarning, match=rf"^ejkernel\.kernels\.{folder}\.{kernel}\.{former} {message}"):
                function = getattr(own, former)
            assert function.__wrapped__ is getattr(ejkernel, public)
            with pytest.warns(DeprecationWarning, match=rf"^ejkernel\.kernels\.{folder}\.{former} {message}"):
                assert getattr(module, former).__wrapped__ is function.__wrapped__


def test_statements_as_users_write_them(python: Any):
    """Also without an import of the parents, and each warning points at the user's line."""
    output = python(
        """
        import warnings
        warnings.simplefilter("always")
        from ejkernel.kernels._xla.flash_attention import flash_attention as a
        from ejkernel.kernels._pallas.tpu.page_attention import page_attention as b
        import ejkernel.kernels._triton.mean_pooling
        from ejkernel.kernels import kernel_registry as c
        from ejkernel.kernels._registry import Platform as d
        from ejkernel.xla_utils.utils import prepare_lens as e
        from ejkernel.xla_utils.cumsum import chunk_local_cumsum as f
        from ejkernel.logging_utils import get_logger as g
        from ejkernel.types.mask import MaskInfo as h
        from ejkernel.modules.operations.gla_attention import gla_attention as i
        print([x.__name__ for x in (a, b, d, e, f, g, h, i)], c is ejkernel.kernel_registry)
        """
    )
    names = "'flash_attention', 'page_attention', 'Platform', 'prepare_lens', 'chunk_local_cumsum', 'get_logger', 'MaskInfo'"
    assert f"[{names}, 'gla_attention'] True" in output
    lines = [4, 5, 7, 8, 9, 10, 11, 12, 13]
    assert [output.count(f"<string>:{line}: DeprecationWarning") for line in lines] == [1] * len(lines)
    for now in ("ejkernel.packing.prepare_lens", "ejkernel.loggings.get_logger", "ejkernel.modules.gla_attention"):
        assert f"is now {now}" in output


@pytest.mark.parametrize(
    ("path", "name", "now"),
    [
        ("ejkernel.xla_utils.utils", "cdiv", packing),
        ("ejkernel.xla_utils.cumsum", "chunk_global_cumsum", packing),
        ("ejkernel.logging_utils", "get_logger", loggings),
        ("ejkernel.types.mask", "MaskInfo", masks),
    ],
)
def test_helpers(path: str, name: str, now: Any):
    module = importlib.import_module(path)
    with pytest.warns(DeprecationWarning, match=rf"^{path}\.{name} is now {now.__name__}\.{name}$"):
        assert getattr(module, name) is getattr(now, name)
    with pytest.raises(AttributeError, match=f"module '{path}' has no attribute 'nothing'"):
        _ = module.nothing
    assert name in dir(module)


def test_unknown_kernels_are_said_plainly():
    with pytest.raises(ModuleNotFoundError, match=r"ejkernel\.kernels\._xla\.no_such_kernel"):
        importlib.import_module("ejkernel.kernels._xla.no_such_kernel")
    with pytest.raises(AttributeError, match=r"module 'ejkernel.kernels._xla' has no attribute 'no_such_kernel'"):
        _ = kernels._xla.no_such_kernel
    with pytest.raises(AttributeError, match=r"module 'ejkernel.kernels' has no attribute '_tilelang'"):
        _ = kernels._tilelang


def test_nothing_is_imported_for_them(python: Any):
    loaded = "print([name for name in sys.modules if name in ('ejkernel.kernels', 'ejkernel.modules')])"
    assert python(f"import sys, ejkernel; {loaded}") == "[]\n"
    assert python(f"import sys, ejkernel.kernels._cuda.unified_attention; {loaded}") == "['ejkernel.kernels']\n"
