"""Build a distribution of compiled Triton kernels for one compute capability, such as ejkernel-kernels-sm90.

    python tools/kernel_wheel.py --capability 90 --out dist

The calls are those of `tools/kernel_shapes.json`. A kernel serves every call with the same dtypes, constants (such as numbers of
heads) and config, whatever its batch and length; lowered code, which serves one shape, is left out. Kernels are of the Triton that
compiles them, whose wheels differ by version of Python: the distribution asks for exactly these.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ejkernel.utils.kernel_store import BUNDLED
from ejkernel_triton._bundles import Manifest, write_bundle

SHAPES = Path(__file__).with_name("kernel_shapes.json")
DEVICES = {
    80: ("NVIDIA A100-SXM4-80GB",),
    89: ("NVIDIA L4", "NVIDIA L40S"),
    90: ("NVIDIA H100 80GB HBM3", "NVIDIA H200"),
    100: ("NVIDIA B200",),
    120: ("NVIDIA GeForce RTX 5090",),
}
"""Of each compute capability the devices whose configs are compiled, besides those of an unknown one."""

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "ejkernel-kernels-sm{capability}"
version = "{version}"
description = "Compiled Triton kernels of ejkernel for compute capability {name}"
requires-python = "=={python}.*"
license = "Apache-2.0"
dependencies = [{dependencies}]

[tool.hatch.build.targets.wheel]
only-include = ["{package}"]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, required=True, choices=DEVICES, help="90 for 9.0")
    parser.add_argument("--shapes", type=Path, default=SHAPES, help="calls, as `ejkernel compile --shapes` reads them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--out", type=Path, required=True, help="folder of the wheel")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        bundle = project / BUNDLED / f"sm{arguments.capability}"
        compile_kernels(arguments, bundle)
        (project / "pyproject.toml").write_text(description(arguments.capability))
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(arguments.out.absolute())]
        subprocess.run(command, cwd=project, check=True)


def compile_kernels(arguments: argparse.Namespace, bundle: Path) -> None:
    """Make the bundle of everything but lowered code."""
    name = capability_name(arguments.capability)
    targets = [f"gpu:{name}", *(f"gpu:{name}:{device}" for device in DEVICES[arguments.capability])]
    options = [option for target in targets for option in ("--target", target)]
    command = [sys.executable, "-m", "ejkernel", "compile", "--shapes", str(arguments.shapes.absolute()), *options]
    subprocess.run([*command, "--platform", "triton", "--out", str(bundle), "--jobs", str(arguments.jobs)], check=True)
    shutil.rmtree(bundle / "kernels-lowered")
    manifest = Manifest.read(bundle)
    write_bundle(bundle, manifest.targets, manifest.made_with)


def description(capability: int) -> str:
    """The distribution's pyproject.toml."""
    exact = ("ejkernel-triton", "jax-triton", "triton")
    return PROJECT.format(
        capability=capability,
        name=capability_name(capability),
        version=importlib.metadata.version("ejkernel-triton"),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        dependencies=", ".join(f'"{package}=={importlib.metadata.version(package)}"' for package in exact),
        package=BUNDLED,
    )


def capability_name(capability: int) -> str:
    """9.0 for 90."""
    return f"{capability // 10}.{capability % 10}"


if __name__ == "__main__":
    main()
