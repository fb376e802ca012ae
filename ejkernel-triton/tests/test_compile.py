"""`ejkernel compile`: kernels that one process compiles without a GPU, and that another finds."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ejkernel.cli import _commands
from ejkernel.cli._entry import main
from ejkernel.utils.kernel_store import MANIFEST, bundled_kernels
from ejkernel_triton import _bundles
from ejkernel_triton._compile import compile_kernels
from ejkernel_triton._versions import version_problem

pytestmark = pytest.mark.skipif(version_problem() is not None, reason=f"lowering for CUDA: {version_problem()}")

PROGRAM = """
import hashlib, json, sys, warnings
import jax
import ejkernel

def step():
    def loss(x, scale):
        return ejkernel.gated_linear_unit(ejkernel.rms_norm(x, scale), x).sum()
    arrays = jax.ShapeDtypeStruct((64, 256), "bfloat16"), jax.ShapeDtypeStruct((256,), "bfloat16")
    return jax.jit(jax.grad(loss, (0, 1))), arrays

def broken():
    raise RuntimeError("no step today")

if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as caught, ejkernel.use("triton", target=sys.argv[1]):
        warnings.simplefilter("always")
        function, arrays = step()
        text = function.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    generator = sys.modules.get("triton.compiler.code_generator")
    print(json.dumps({"text": hashlib.sha256(text.encode()).hexdigest(), "kernels": text.count("@triton_kernel_call"),
                      "triton": generator is not None, "warnings": [str(one.message) for one in caught]}))
"""


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder with a program, which is run with an empty cache each time."""

    folder: Path

    def run(self, *bundles: Path, target: str = "gpu:9.0", cache: str = "") -> dict[str, object]:
        empty = self.folder / f"cache{len([*self.folder.glob('cache*')])}"
        empty.mkdir()
        own = {"EJKERNEL_CACHE_DIR": cache or str(empty), "EJKERNEL_KERNELS": os.pathsep.join(map(str, bundles))}
        done = subprocess.run(
            [sys.executable, str(self.folder / "program.py"), target],
            env={**os.environ, **own, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return {**json.loads(done.stdout.splitlines()[-1]), "kept": len([*empty.rglob("*.kernel")])}


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path)


@pytest.fixture
def cli(monkeypatch, capfd):
    """Run the command, whether this distribution was installed before it had one or not."""
    command = _commands.Command("compile", "ejkernel-triton", "0", "ejkernel_triton._compile:compile_kernels")
    monkeypatch.setattr(_commands, "found_commands", lambda built_in: (command,))

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["compile", *arguments])
        return status, *capfd.readouterr()

    return run


def test_the_command_is_declared():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    reference = f"{compile_kernels.__module__}:{compile_kernels.__name__}"
    assert project["entry-points"]["ejkernel.commands"] == {"compile": reference}
    assert _commands.OWNERS["compile"] == project["name"]


def test_another_process_compiles_nothing(place, cli):
    options = ("--target", "gpu:9.0", "--platform", "triton", "--out", "bundle", "--jobs", "2", "--json")
    status, out, _ = cli("program.py:step", *options)
    document = json.loads(out)
    assert (status, document["kernels"], document["targets"]) == (0, 8, ["gpu (sm_90)"])
    assert document["programs"] == [
        {
            "program": "program.py:step",
            "target": "gpu (sm_90)",
            "implementations": ["triton"],
            "ahead": ["triton"],
            "error": "",
        }
    ]
    bundle = place.folder / "bundle"
    assert {path.stat().st_mode & 0o777 for path in bundle.rglob("*.*")} == {0o644}
    for path in (*bundle.rglob("*"), bundle):
        path.chmod(0o555 if path.is_dir() else 0o444)

    alone = place.run()
    assert alone == {"text": alone["text"], "kernels": 4, "triton": True, "warnings": [], "kept": 8}
    assert place.run(bundle) == {**alone, "triton": False, "kept": 0}
    assert place.run(bundle, cache="/proc/nowhere") == {**alone, "triton": False, "kept": 0}
    assert place.run(place.folder / "missing", bundle)["triton"] is False

    # another device of the same capability may get other configs, and where it gets the same ones the compiled kernels serve it
    other = place.run(bundle, target="gpu:9.0:NVIDIA H200")
    assert (other["text"], other["triton"], other["warnings"], other["kept"]) == (alone["text"], True, [], 4)
    assert place.run(bundle, target="gpu:8.0")["kept"] == 8

    (damaged, *_) = bundled_kernels(bundle)
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    again = place.run(bundle)
    assert (again["text"], again["kernels"]) == (alone["text"], 4)
    (warning,) = again["warnings"]
    assert "is damaged and compiled here" in warning
    assert _bundles.worth(bundle) == "1 of its 8 kernels are missing or damaged; make it again with `ejkernel compile`"


def test_what_a_bundle_is_worth(place, cli, monkeypatch):
    bundle = place.folder / "bundle"
    shapes = {"softmax": [{"arrays": {"x": "bfloat16[64,256]"}}], "rms_norm": [{"arrays": {"x": "float32[8,128]"}}]}
    (place.folder / "shapes.json").write_text(json.dumps(shapes))
    status, out, _ = cli(
        *("--shapes", "shapes.json", "program.py:broken", "--target", "gpu:9.0", "--platform", "triton,xla"),
        *("--out", "bundle", "--jobs", "2"),
    )
    assert status == 1 and "RuntimeError: no step today" in out
    count = len(bundled_kernels(bundle))
    assert count >= 6 and f"bundle: {count} kernels" in out
    assert _bundles.worth(bundle) == f"its {count} kernels are used for gpu (sm_90)"

    status, *_ = cli("softmax", "--forward-only", "--target", "gpu:8.0", "--out", "bundle", "--jobs", "1")
    assert status == 0 and len(bundled_kernels(bundle)) > count
    assert "gpu (sm_80) and gpu (sm_90)" in _bundles.worth(bundle)

    installed = importlib.metadata.version("triton")
    version = _bundles._version
    with monkeypatch.context() as patch:
        patch.setattr(_bundles, "_version", lambda name: "99" if name == "triton" else version(name))
        count = len(bundled_kernels(bundle))
        assert _bundles.worth(bundle) == f"was made for triton {installed}, this is 99: none of its {count} kernels is used"
        refused = cli("rms_norm", "--target", "gpu:9.0", "--out", "bundle")
        assert refused[0] == 2 and f"was made for triton {installed}, this is 99; name another folder" in refused[2]
    with monkeypatch.context() as patch:
        patch.setattr(_bundles, "_version", lambda name: "0.9" if name == "jax" else version(name))
        lowered = len([*bundle.glob("kernels-lowered/*")])
        assert f"{lowered} of its {count} kernels are not used" in _bundles.worth(bundle)
    with monkeypatch.context() as patch:
        patch.setenv("PTXAS_OPTIONS", "-O0")
        assert f"none of its {count} kernels is used" in _bundles.worth(bundle)
        assert "the compiler of triton" in _bundles.worth(bundle)
    monkeypatch.setenv("EJKERNEL_KERNELS", os.pathsep.join(["missing", str(bundle)]))
    found = dict(_bundles.findings())
    assert found[Path("missing")].startswith("no bundle of kernels") and "are used" in found[bundle]
    (bundle / MANIFEST).write_text('{"level": 1')
    assert "bundle.json is missing or damaged" in dict(_bundles.findings())[bundle]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--target", "gpu:9.0", "--out", "x"), "name operations or module:function"),
        (("rms_norm", "--out", "x"), "say for which device"),
        (("rms_norm", "--target", "gpu:90", "--out", "x"), "target: got 'gpu:90'"),
        (("rms_nrom", "--target", "gpu:9.0", "--out", "x"), "rms_nrom"),
        (("rms_norm", "--target", "gpu:9.0", "--out", "."), "holds something else"),
        (("--shapes", "none.json", "--target", "gpu:9.0", "--out", "x"), "--shapes: none.json"),
        (("--shapes", "list.json", "--target", "gpu:9.0", "--out", "x"), "expected an object"),
    ],
)
def test_mistakes(arguments, expected, place, cli):
    (place.folder / "list.json").write_text("[]")
    status, _, errors = cli(*arguments)
    assert status == 2 and expected in errors, errors
    assert not (place.folder / "x").exists()
