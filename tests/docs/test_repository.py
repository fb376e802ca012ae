"""The files of the repository that tools and newcomers read agree with the packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def text(name: str) -> str:
    return (ROOT / name).read_text()


def test_readme_is_short():
    assert len(text("README.md").splitlines()) <= 250


def test_citation_has_the_version_and_the_licence_of_core():
    project = tomllib.loads(text("ejkernel-core/pyproject.toml"))["project"]
    fields = dict(re.findall(r"^([\w-]+): (.+)$", text("CITATION.cff"), re.MULTILINE))
    assert fields["version"] == project["version"]
    assert fields["license"] == project["license"]


def test_lines_that_install_from_a_checkout_name_all_that_the_extras_bring():
    """Nothing of ours is on an index before the first release."""
    lines = re.findall(r"pip install (\S*\./ejkernel-core\[[^`#\n]+)", text("docs/install.md") + text("README.md"))
    extras = tomllib.loads(text("ejkernel-core/pyproject.toml"))["project"]["optional-dependencies"]
    assert len(lines) >= 5
    for line in lines:
        named = re.findall(r"\./ejkernel-core\[([\w,]+)\]", line)[0].split(",")
        needed = {re.split(r"[<>=\[]", one)[0] for extra in named for one in extras[extra] if one.startswith("ejkernel-")}
        assert needed <= {*re.findall(r"\./(ejkernel-\w+)", line)}, line


def test_hooks_use_the_ruff_that_nox_pins():
    pinned = re.findall(r'"(ruff==[\d.]+)"', text("noxfile.py"))
    assert len(pinned) == 1
    assert re.findall(r'"(ruff==[\d.]+)"', text(".pre-commit-config.yaml")) == pinned


def test_changelog_is_in_the_form_of_keep_a_changelog():
    versions = re.findall(r"^## (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    kinds = re.findall(r"^### (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    assert versions
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \((unreleased|\d{4}-\d{2}-\d{2})\)", version) for version in versions)
    assert kinds
    assert {*kinds} <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_client_is_installed_with_all_that_core_needs():
    """Core itself is installed without its dependencies, as EasyDeL's pins would contradict them."""
    needed = tomllib.loads(text("ejkernel-core/pyproject.toml"))["project"]["dependencies"]
    listed = text("tests/clients/easydel/requirements.txt")
    names = {re.split(r"[<>=]", line)[0] for line in listed.splitlines()}
    assert {re.split(r"[<>=]", one)[0] for one in needed} <= names
    recipe = text("tests/clients/easydel/README.md")
    assert all((ROOT / path).exists() for path in re.findall(r"(?:--override|-r|-e) (\S+)", recipe))
