"""Core's layers: a file imports from its own layer and from those below, nowhere from above and nowhere in a circle.

Every import statement counts, wherever it stands: at the top, inside a function, or for types only.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

import ejkernel

ROOT = Path(ejkernel.__file__).parent

LAYERS = (
    ("_notebook", "_version", "errors", "plugin", "targets", "typing"),
    ("callib", "logging_utils", "loggings", "masks", "packing", "quantization", "types", "utils", "xla_utils"),
    ("_plugins",),
    ("call",),
    ("configs",),
    ("_dispatch",),
    ("_pipeline",),
    ("operations",),
    ("compositions",),
    ("tuning",),
    ("modules", "ops"),
    ("optimizers", "testing"),
    ("cli",),
    ("", "__main__", "kernels", "operation"),
)
"""From the ground up; names are files and folders of the package, "" its own `__init__`."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def files() -> dict[str, Path]:
    """Dotted names below `ejkernel`, and where they are; a package is its `__init__`."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


FILES = files()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name below `ejkernel` of everything of core that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write it in full"
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in named:
            package, _, inner = name.partition(".")
            if package == "ejkernel":
                yield node.lineno, inner if inner in FILES else inner.rpartition(".")[0]


def runs_first(name: str, wanted: str) -> set[str]:
    """What Python runs when the file `name` imports `wanted`: that and the packages that it is in, but for those of `name`."""
    return {part for part in (wanted, *packages(wanted)) if part not in (name, *packages(name))}


def packages(name: str) -> list[str]:
    """The packages below `ejkernel` that a file is in."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_import_points_upwards(name):
    level = LEVEL[name.partition(".")[0]]
    upwards = [
        f"{FILES[name]}:{line}: imports {wanted or 'ejkernel'} of layer {LEVEL[wanted.partition('.')[0]]} from layer {level}"
        for line, wanted in imports(FILES[name])
        if LEVEL[wanted.partition(".")[0]] > level
    ]
    assert not upwards, "\n".join(upwards)


@pytest.mark.tree
def test_no_circles():
    """What is left after files without imports are taken away, again and again, is a circle or stands above one."""
    graph = {name: {run for _, wanted in imports(path) for run in runs_first(name, wanted)} for name, path in FILES.items()}
    while ground := {name for name, wanted in graph.items() if not wanted}:
        graph = {name: wanted - ground for name, wanted in graph.items() if name not in ground}
    while tops := graph.keys() - set(itertools.chain.from_iterable(graph.values())):
        graph = {name: wanted for name, wanted in graph.items() if name not in tops}
    assert not graph, "\n".join(f"{name} -> {', '.join(sorted(wanted))}" for name, wanted in sorted(graph.items()))


@pytest.mark.tree
def test_every_file_has_a_layer():
    assert {name.partition(".")[0] for name in FILES} == set(LEVEL)


PACK = {"operations", "compositions", "modules"}
"""Core's own operations, with what is made of them."""

ON_TOP = {"", "__main__", "kernels", "operation", "optimizers"}
MENTIONED = {"ops": {"modules"}}
"""`ejkernel.ops` has the executor's name for type checkers."""


@pytest.mark.tree
def test_the_mechanism_names_no_operation():
    """Third parties' operations get what core's get."""
    known = {path.parent.name for path in (ROOT / "operations").glob("*/interface.py")}
    assert {"flash_attention", "rms_norm"} <= known
    for name, path in FILES.items():
        if name.partition(".")[0] in PACK | ON_TOP:
            continue
        used = {wanted.partition(".")[0] for _, wanted in imports(path)} & PACK
        assert not used - MENTIONED.get(name, set()), f"{name} imports {used}"
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose}
        assert not known & {word for word in words if isinstance(word, str)}, name
