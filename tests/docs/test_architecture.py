"""docs/architecture.md describes the tree as it is: its layers, and files that exist."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "ejkernel-core" / "src" / "ejkernel"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def layers() -> tuple[tuple[str, ...], ...]:
    """`LAYERS` of the test that holds core to them."""
    for node in ast.parse((ROOT / "ejkernel-core" / "tests" / "test_layers.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return ast.literal_eval(node.value)
    raise AssertionError("test_layers.py has no LAYERS")


def test_layers_are_those_of_the_test():
    rows = re.findall(r"^\| (\d+) \| (`[^|]+`) \| [^|]+ \|$", PAGE.partition("\n## The trip")[0], re.MULTILINE)
    described = {int(level): re.findall(r"`(\w+)`", names) for level, names in rows}
    assert described == {level: sorted(name or "__init__" for name in names) for level, names in enumerate(layers())}


def test_files_exist():
    named = set(re.findall(r"`(?:(ejkernel-core/|tests/)?([\w/]+\.py))`", PAGE))
    inside = {name for start, name in named if not start and "/" in name}
    assert {"_pipeline/operation.py", "configs/select.py", "_plugins/discovery.py"} <= inside
    assert not [name for name in inside if not (CORE / name).is_file()]
    assert not [start + name for start, name in named if start and not (ROOT / start / name).is_file()]


def test_tiers_are_in_the_order_of_select():
    from ejkernel.call.policy import policy_for_call
    from ejkernel.configs.select import stored_tiers

    told = re.findall(r"^\| ([a-z ]+) \| `configs/", PAGE, re.MULTILINE)
    stored = [tier for _, tier in stored_tiers(policy_for_call("rms_norm", None))]
    assert told == ["override", "overlay", *stored, "heuristic"]


def test_public_modules_have_the_names():
    for module, text in re.findall(r"^\| `(ejkernel\.\w+)` \| (.+) \|$", PAGE, re.MULTILINE):
        found = importlib.import_module(module)
        assert not [name for name in re.findall(r"`([A-Za-z]\w*)`", text) if not hasattr(found, name)]
