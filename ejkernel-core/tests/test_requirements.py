"""Version specifiers without `packaging`, and finding modules without importing them."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, strategies as st
from packaging.specifiers import SpecifierSet

from ejkernel._plugins.requirements import admits, canonical, findable, pip_install

releases = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
clauses = st.tuples(st.sampled_from((">=", "<=", "==", "!=", ">", "<")), releases).map("".join)


@given(version=releases, specifier=st.lists(clauses, min_size=1, max_size=3).map(", ".join))
def test_plain_comparison_agrees_with_packaging(version, specifier):
    assert admits(specifier, version) == SpecifierSet(specifier).contains(version, prereleases=True)


@pytest.mark.parametrize(
    ("specifier", "version", "expected"),
    [
        ("", "1.0", True),
        (">=3.6,<4", "3.6.0", True),
        (">=3.6,<4", "4", False),
        ("~=1.4", "1.9", True),
        ("==2.*", "2.7.1", True),
        (">=2", "2.0.dev1", False),
        (">=2.dev0", "2.0.dev1", True),
        ("==1.0", "1.0+cuda12", True),
    ],
)
def test_admits(specifier, version, expected):
    assert admits(specifier, version) is expected


@pytest.mark.parametrize(("specifier", "version"), [("newest", "1.0"), (">=1", "not a version")])
def test_malformed(specifier, version):
    with pytest.raises(ValueError, match="nvalid"):
        admits(specifier, version)


def test_findable(tmp_path, monkeypatch):
    package = tmp_path / "unimported_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError")
    (package / "inner" / "__init__.py").write_text("")
    (package / "inner" / "leaf.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert findable("unimported_package")
    assert findable("unimported_package.inner.leaf")
    assert not findable("unimported_package.other")
    assert not findable("unimported_package.inner.leaf.deeper")
    assert not findable("no_such_package.inner")
    assert findable("os.path")
    assert "unimported_package" not in sys.modules


def test_findable_with_a_module_without_spec(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_at_run_time", type(sys)("made_at_run_time"))
    assert findable("made_at_run_time")


def test_canonical():
    assert canonical("Jax_Triton.X") == "jax-triton-x"


def test_pip_install_quotes_for_the_shell():
    assert pip_install(["triton>=3.6,<4", "numpy"]) == "pip install 'triton>=3.6,<4' numpy"
    assert pip_install(["a"], upgrade=True) == "pip install --upgrade a"
