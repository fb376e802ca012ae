"""The documents of a release: constraints with hashes and the bill of materials. `nox -s release` runs this on what it made."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LOCK = f"""absl-py==2.5.1 \\
    --hash=sha256:{"a" * 64} \\
    --hash=sha256:{"b" * 64}
jax==0.10.2 ; python_full_version < '3.12' \\
    --hash=sha256:{"c" * 64}
jax==0.12.0.1 ; python_full_version >= '3.12' \\
    --hash=sha256:{"d" * 64}
"""

release = pytest.mark.skipif("EJKERNEL_RELEASE" not in os.environ, reason="needs a release; nox -s release makes one")


@pytest.fixture(scope="module")
def documents():
    """The tool, which is a script."""
    spec = importlib.util.spec_from_file_location("release_documents", ROOT / "tools" / "release_documents.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder() -> Path:
    return Path(os.environ["EJKERNEL_RELEASE"])


def test_needs_of_a_kind_of_machine_are_those_of_its_platforms(documents):
    needs = {extra: documents.third_party("ejkernel-core", (extra,)) for extra in documents.MACHINES}
    assert not [item for found in needs.values() for item in found if item.startswith("ejkernel")]
    assert all("jax>=0.10.2,<0.13" in found for found in needs.values())
    assert {extra for extra, found in needs.items() if "triton>=3.6,<3.10" in found} == {"cuda12", "cuda13"}
    assert {extra for extra, found in needs.items() if f"jax[{extra}]" in found} == {"cuda12", "cuda13", "tpu"}
    assert {*documents.third_party("ejkernel-core", ("cpu", "cli"))} - {*needs["cpu"]} == {"rich>=13", "typer>=0.12"}


def test_constraints_are_read(documents):
    assert list(documents.pinned(LOCK)) == [
        ("absl-py", "2.5.1", "", ["a" * 64, "b" * 64]),
        ("jax", "0.10.2", "python_full_version < '3.12'", ["c" * 64]),
        ("jax", "0.12.0.1", "python_full_version >= '3.12'", ["d" * 64]),
    ]


def test_works_of_others_in_the_library(documents):
    found = dict(documents.linked())
    assert [*found] == ["XLA", "CUDA Toolkit 13", "GCC's runtime"]
    assert found["XLA"] == "Apache-2.0" and found["CUDA Toolkit 13"] == "CUDA Toolkit End User License Agreement"


def test_bill_of_materials(documents, tmp_path):
    pytest.importorskip("cyclonedx", reason="needs cyclonedx-python-lib; nox -s release installs it")
    wheel = tmp_path / "ejkernel_core-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    text = documents.bill_of_materials([wheel], [LOCK])
    assert text == documents.bill_of_materials([wheel], [LOCK])
    bill = json.loads(text)
    parts = {part["bom-ref"]: part for part in bill["components"]}
    core = parts["pkg:pypi/ejkernel-core@0.1.0"]
    assert core["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"a wheel").hexdigest()}]
    assert [one["content"][0] for one in parts["pkg:pypi/absl-py@2.5.1"]["hashes"]] == ["a", "b"]
    needs = {row["ref"]: row.get("dependsOn", []) for row in bill["dependencies"]}
    assert {*needs["pkg:pypi/ejkernel-core@0.1.0"]} >= {"pkg:pypi/jax@0.10.2", "pkg:pypi/jax@0.12.0.1"}
    assert "XLA" in needs["pkg:pypi/ejkernel-cuda@0.1.0"] and "XLA" not in needs["pkg:pypi/ejkernel-xla@0.1.0"]


@release
def test_released_constraints(documents, folder):
    for extra in documents.MACHINES:
        text = (folder / f"constraints-{extra}.txt").read_text()
        found = list(documents.pinned(text))
        wanted = {re.match(r"[\w.-]+", item)[0] for item in documents.third_party("ejkernel-core", (extra, "cli"))}
        assert wanted <= {name for name, *_ in found}
        assert all(digests for *_, digests in found) and "://" not in text
        assert len(found) == sum(1 for line in text.splitlines() if not line.startswith((" ", "#")))


@release
def test_released_bill_of_materials(documents, folder):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    (path,) = folder.glob("*.cdx.json")
    text = path.read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert {*re.findall(r"https?://[^\"]+", text)} == {"http://cyclonedx.org/schema/bom-1.6.schema.json"}
    hashes = {one["content"] for part in json.loads(text)["components"] for one in part.get("hashes", ())}
    built = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    assert built and {hashlib.sha256(file.read_bytes()).hexdigest() for file in built} <= hashes
