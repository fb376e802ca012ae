"""Whether a Mosaic GPU kernel supports a call, and with which config, is answered without the second that its import takes."""

from __future__ import annotations

import subprocess
import sys

from ejkernel_pallas._plugin import ejkernel_plugin


def test_capability_and_config_do_not_import_mosaic_gpu() -> None:
    listed = [each for each in ejkernel_plugin().implementations if each.variant == "mosaic_gpu"]
    references = [
        *(each.supports for each in listed),
        *(each.configs for each in listed),
        *(each.lowered_from for each in listed),
    ]
    modules = sorted({str(reference).partition(":")[0] for reference in references})
    assert len(modules) == 7
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    code += "print([name for name in sys.modules if name.startswith('jax.experimental') and 'mosaic' in name])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
