"""The worked examples of CONTRIBUTING.md: each is applied to a copy of the tree, used there, and held to the conformance suite."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SOURCES = (*(f"ejkernel-{name}/src" for name in ("core", "xla", "triton", "pallas")), "benchmarks/src")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.so", "build", "dist", "node_modules")
TESTS = ("ejkernel-core/tests", "ejkernel-xla/tests", "tests")
COMPARING = re.compile(r"\b(FUNCTIONS|OPERATIONS|CALLS|FILES|mark\.tree)\b")
"""What is in a file of tests that goes through the tree's operations, functions or files."""

BLOCK = re.compile(r"^```(python|diff)\n(# file: .*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^# file: (\S+)\n(.*?)(?=^# file: |\Z)", re.MULTILINE | re.DOTALL)
MOST_LINES = 60
IN_TABLE = {
    "operation": "A new operation",
    "option": "A new option of an operation",
    "kernel": "A platform's kernel",
    "config": "A new config",
}


class Change(NamedTuple):
    """One file's part of a fenced block: `python` is the file, `diff` changes it."""

    kind: str
    path: str
    text: str


def examples() -> dict[str, list[Change]]:
    """The changes of each example, in order."""
    parts = re.split(r"^<!-- example: (\w+) -->$", PAGE, flags=re.MULTILINE)[1:]
    return {
        name: [Change(kind, *file) for kind, block in BLOCK.findall(text) for file in FILE.findall(block)]
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


EXAMPLES = examples()


class Tree:
    """A copy of the repository's sources, and Python on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT, root, ignore=NOT_COPIED, dirs_exist_ok=True)

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            path = self.root / change.path
            if change.kind == "python":
                assert not path.exists(), f"{change.path} is no new file"
                path.parent.mkdir(exist_ok=True)
                path.write_text(change.text.rstrip("\n") + "\n")
            else:
                path.write_text(patched(path.read_text(), change.text))

    def run(self, *arguments: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")}
        own = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compilation takes most of the time
            "EJKERNEL_PLUGINS": "xla,pallas",
            "EJKERNEL_CACHE_DIR": str(self.root / "cache"),
            "PYTHONPATH": os.pathsep.join(str(self.root / source) for source in SOURCES),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        result = subprocess.run(
            [sys.executable, *arguments], cwd=self.root, env={**clean, **own}, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-6000:]
        return result.stdout

    def python(self, program: str) -> None:
        self.run("-c", f"{PREAMBLE}\nassert ejkernel.__file__.startswith({str(self.root)!r})\n{program}")

    def conforms(self, platform: str, operation: str, suite: str) -> None:
        """The conformance suite finds nothing wrong at its default extent, of which the quick one is a part, and saw numbers."""
        wanted = (f"--ejkernel-platform={platform}", f"--ejkernel-operation={operation}", "--extent=standard")
        less = ("--deselect", f"{suite}::test_plugin_module")  # that one is a matter of milliseconds
        said = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "ejkernel.testing.plugin", *wanted, *less, suite)
        assert re.search(rf"^{operation} +numbers +[1-9]", said, re.MULTILINE), said

    def agrees(self, *names: str) -> None:
        """The tests that compare parts of the tree pass, and those of what is new, if it is known by names."""
        self.run("tools/generated_tables.py")
        others = {
            *self.root.glob("tests/docs/test_contributing.py"),
            *self.root.glob("tests/device/*"),
            *self.root.glob("tests/clients/**/*"),
        }
        files = {path for folder in TESTS for path in (self.root / folder).rglob("test_*.py")} - others
        chosen = sorted(str(path.relative_to(self.root)) for path in files if COMPARING.search(path.read_text()))
        for which in (("-m", "tree"), *[("-k", " or ".join(names), "--extent=full")] * bool(names)):
            said = self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *which, *chosen)
            assert re.search(r"^[1-9]\d* passed", said, re.MULTILINE), said


PREAMBLE = """
import jax, jax.numpy as jnp, numpy as np, ejkernel
x = np.arange(24, dtype=np.float32).reshape(1, 6, 4) / 7
bounds = np.array([0, 2, 2, 5])
"""


def patched(text: str, diff: str) -> str:
    """A text with the hunks of a diff applied; each must fit in exactly one place."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert {line[0] for line in lines} <= {*" +-"}, hunk
        starts = [match.start() for match in re.finditer(f"^(?={re.escape(old)})", text, re.MULTILINE)]
        assert old and len(starts) == 1, f"fits in {len(starts)} places:\n{hunk}"
        (start,) = starts
        text = text[:start] + new + text[start + len(old) :]
    return text


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_new_operation(tree):
    tree.apply(EXAMPLES["operation"])
    tree.python("""
rows = x[0]
np.testing.assert_allclose(ejkernel.scaled_sum(rows, scale=2.0), 2 * rows.sum(axis=1), rtol=1e-6)
np.testing.assert_allclose(jax.grad(lambda rows: ejkernel.ScaledSum()(rows, scale=3.0)[1])(rows)[:2], [[0] * 4, [3] * 4])
np.testing.assert_allclose(jax.vmap(ejkernel.scaled_sum)(np.stack([rows, -rows]))[1], -rows.sum(axis=1), rtol=1e-6)
assert ejkernel.explain("scaled_sum", rows).forward.chosen.id == "xla"
""")
    tree.conforms("xla", "scaled_sum", "tests/conformance/test_platform.py")
    tree.agrees("scaled_sum", "ScaledSum")


def test_a_new_option(tree):
    """Until a platform accepts it, it is refused; then it is honoured."""
    core = [change for change in EXAMPLES["option"] if change.path.startswith("ejkernel-core/")]
    tree.apply(core)
    tree.python("""
np.testing.assert_allclose(ejkernel.mean_pooling(x), x.mean(axis=1), rtol=1e-6)
try:
    ejkernel.mean_pooling(x, reduction="sum")
except ejkernel.NoKernelError as error:
    assert "xla does not accept reduction" in str(error)
else:
    raise AssertionError("the option was ignored")
""")
    tree.apply(change for change in EXAMPLES["option"] if change not in core)
    tree.python("""
np.testing.assert_allclose(ejkernel.mean_pooling(x, reduction="sum"), x.sum(axis=1), rtol=1e-6)
packed = ejkernel.mean_pooling(x, bounds, reduction="sum")
np.testing.assert_allclose(packed, [x[0, :2].sum(axis=0), np.zeros(4), x[0, 2:5].sum(axis=0)], rtol=1e-6)
gradient = jax.grad(lambda x: ejkernel.mean_pooling(x, bounds, reduction="sum").sum())(x)
np.testing.assert_array_equal(gradient[0, :, 0], [1, 1, 1, 1, 1, 0])
""")
    tree.conforms("xla", "mean_pooling", "tests/conformance/test_platform.py")
    tree.agrees()


def test_a_platforms_kernel(tree):
    tree.apply(EXAMPLES["kernel"])
    tree.python("""
from jax.experimental.pallas import tpu as pltpu
from ejkernel.plugin import Target
with ejkernel.use(target=Target("tpu", "TPU v6 lite")):
    with pltpu.force_tpu_interpret_mode():
        out = ejkernel.softmax(x, scale=0.5, platform="pallas", cfg={"rows": 16})
    asked, masked = (ejkernel.explain("softmax", x, where=w, platform="pallas") for w in (None, x > 1))
    assert ejkernel.explain("softmax", x).forward.chosen.id == "xla"  # not measured
np.testing.assert_allclose(out, jax.nn.softmax(0.5 * x), rtol=1e-5)
assert (asked.forward.chosen.id, asked.forward.tier, asked.backward.chosen.id) == ("pallas.tpu", "heuristic", "xla")
assert masked.forward.chosen is None and "pallas.tpu does not accept where" in str(masked)
""")
    tree.conforms("pallas", "softmax", "ejkernel-pallas/tests/test_conformance.py")
    tree.agrees()


def test_a_new_config(tree):
    tree.apply(EXAMPLES["config"])
    tree.python("""
decision = ejkernel.explain("mean_pooling", x, bounds).forward
assert (decision.config.search, decision.tier) == ("scan", "heuristic")
means = [ejkernel.mean_pooling(x, bounds, cfg={"search": name}) for name in ("scan", "sort", "compare_all")]
for mean in means:
    np.testing.assert_allclose(mean, [x[0, :2].mean(axis=0), np.zeros(4), x[0, 2:5].mean(axis=0)], rtol=1e-6)
try:
    ejkernel.mean_pooling(x, bounds, cfg={"search": "guess"})
except ValueError as error:
    assert "search: got 'guess', expected one of scan, sort, compare_all" in str(error)
else:
    raise AssertionError("an illegal knob was taken")
""")
    tree.conforms("xla", "mean_pooling", "tests/conformance/test_platform.py")
    tree.agrees()


def test_every_example_is_run():
    assert EXAMPLES.keys() == IN_TABLE.keys()


@pytest.mark.parametrize("name", IN_TABLE)
def test_number_of_files(name):
    counted = re.search(rf"^\| {IN_TABLE[name]} \| (\d+) \|", PAGE, re.MULTILINE)
    assert counted and int(counted[1]) == len({change.path for change in EXAMPLES[name]})


def test_files_of_an_option_of_flash_attention():
    """`normalize_output`, which has neither a check nor a part in rings, stands in core where the page says and nowhere else."""
    said = re.search(r"^An option of `flash_attention` touches (\d+) files: (.*?)\. Two more", PAGE, re.MULTILINE | re.DOTALL)
    assert said
    files = re.findall(r"`([\w/]+\.(?:py|md))`", said[2])
    assert len(files) == int(said[1])
    source = ROOT / "ejkernel-core/src/ejkernel"
    holding = {path.name for path in source.rglob("*.py") if "normalize_output" in path.read_text()}
    assert holding == {"interface.py", "reference.py", "cases.py", "dense_attention.py"} <= {*files}


def test_blocks_are_short():
    for _, block in BLOCK.findall(PAGE):
        assert len([line for line in block.splitlines() if line.strip()]) <= MOST_LINES, block.partition("\n")[0]


def test_hunks_that_do_not_fit_are_found():
    assert patched("a\nb\nc\n", " a\n+x\n@@\n-c\n+d\n") == "a\nx\nb\nd\n"
    for text in ("b\n", "a\na\n", "xa\n"):
        with pytest.raises(AssertionError, match="places"):
            patched(text, "-a\n+b\n")
