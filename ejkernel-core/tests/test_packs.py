"""Packs of operations: what third parties bring, and what none of them can take away."""

from __future__ import annotations

import textwrap
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel._plugins import catalog
from ejkernel._plugins.discovery import discover
from ejkernel.errors import PluginWarning

LIGHT = """
from ejkernel.plugin import *

@hookimpl
def {hook}():
    return {answer}
"""

pytest.importorskip("beartype.door")  # imported before paths are sealed

INTERFACE = """
    import dataclasses
    from typing import Any, NamedTuple

    from ejkernel.operation import ArraySpec, Bound, Call, Cost, Operation

    class Inputs(NamedTuple):
        x: Any

    class Outputs(NamedTuple):
        out: Any

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class DoubleCall(Call):
        x: ArraySpec

    class Double(Operation):
        name = "double"
        Call, Inputs, Outputs, revisions, differentiable = DoubleCall, Inputs, Outputs, (0,), ("x",)

        def canonicalise(self, x):
            return Bound(DoubleCall(x=ArraySpec.of(x)), Inputs(x), lambda outputs: outputs.out)

        def dimensions(self, call):
            return {"x": "b d", "out": "b d"}

        def output_specs(self, call):
            return Outputs(call.x)

        def public(self, call):
            return ("out",)

        def cost(self, call, phase):
            return Cost(call.x.size, call.x.nbytes)

    OPERATION = Double()
    """

FUNCTIONS = """
    from {package}.operations.{name}.interface import OPERATION
    from ejkernel.operation import public

    __all__ = ["{function}"]

    @public()
    def {function}(x, *, platform=None, cfg=None):
        return OPERATION.invoke({{"x": x}}, {{}}, platform=platform, cfg=cfg)

    @public(dispatches=False)
    def unlisted():
        pass
    """


def pack_of(
    site: Any, package: str, *, operation: str = "double", function: str = "double", entry: str = "", **fields: str
) -> None:
    """A distribution with one operation and its public function."""
    written = {"name": repr(entry or package), "api_level": "3", "operations": repr(f"{package}.operations"), **fields}
    written.setdefault("functions", repr(f"{package}.functions"))
    answer = ", ".join(f"{key}={value}" for key, value in written.items())
    modules = {
        f"{package}.__init__": "",
        f"{package}.light": LIGHT.format(hook="ejkernel_operations", answer=f"OperationPack({answer})"),
        f"{package}.operations.__init__": "",
        f"{package}.operations.{operation}.__init__": "",
        f"{package}.operations.{operation}.interface": INTERFACE,
        f"{package}.functions": textwrap.dedent(FUNCTIONS).format(package=package, name=operation, function=function),
    }
    site.add(f"ejk-{package}", f"{entry or package} = {package}.light", modules, group="ejkernel.operations")


@pytest.fixture
def found(sealed):
    """What discovery makes of the packs: a function that returns their records by distribution, and the warnings."""
    before = catalog.packs()

    def run() -> tuple[dict[str, Any], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PluginWarning)
            discover()
        return {record.distribution: record for record in catalog.packs()}, [str(warning.message) for warning in caught]

    yield run
    catalog.load(before)


def test_an_operation_of_a_third_party(sealed, found):
    pack_of(sealed, "acme")
    records, messages = found()
    assert messages == []
    assert records["ejk-acme"].state == "ok" and records["ejk-acme"].operations == ("double",)
    assert catalog.OPERATIONS["double"] == "acme.operations.double"
    assert catalog.FUNCTIONS["double"] == "acme.functions"
    assert "unlisted" not in catalog.FACADES
    assert "double" in ejkernel.kernel_registry.list_operations()
    x = jnp.ones((2, 3))
    with pytest.raises(ejkernel.NoKernelError, match=r"double forward on cpu: nothing"):
        catalog.public_function("double")(x)
    kept = ejkernel.kernel_registry.register("double", "mine", "any", plain_jax=True)
    from acme.operations.double.interface import Outputs  # pyright: ignore

    kept(lambda call, inputs, config: Outputs(2 * inputs.x))
    try:
        np.testing.assert_array_equal(catalog.public_function("double")(x), 2 * x)
        assert ejkernel.explain("double", x).forward.chosen.id == "mine"
    finally:
        ejkernel.kernel_registry.unregister("double", "mine")


def test_operations_of_ours_stand(sealed, found):
    pack_of(sealed, "acme", operation="rms_norm")
    records, messages = found()
    assert records["ejk-acme"].state == "conflict"
    (message,) = messages
    assert "pack of operations 'acme' (ejk-acme 1.0)" in message
    assert "it brings 'rms_norm', which ejkernel-core 1.0 brings too" in message and "pip uninstall ejk-acme" in message
    assert catalog.OPERATIONS["rms_norm"] == "ejkernel.operations.rms_norm"
    assert "double" not in catalog.FUNCTIONS


def test_functions_of_ours_stand(sealed, found):
    pack_of(sealed, "acme", function="rms_norm")
    records, (message,) = found()
    assert records["ejk-acme"].state == "conflict" and "'rms_norm'" in message
    assert catalog.FUNCTIONS["rms_norm"] == "ejkernel.modules.norms"


def test_a_name_that_two_bring_is_nobodys(sealed, found):
    pack_of(sealed, "acme")
    pack_of(sealed, "zeta")
    records, messages = found()
    assert [records[name].state for name in ("ejk-acme", "ejk-zeta")] == ["conflict", "conflict"]
    assert len(messages) == 2 and all("'double'" in message for message in messages)
    assert "double" not in catalog.OPERATIONS
    assert "rms_norm" in catalog.OPERATIONS


def test_our_name_is_reserved(sealed, found):
    pack_of(sealed, "acme", entry="core")
    records, (message,) = found()
    assert records["ejk-acme"].state == "conflict" and "the name 'core' belongs to ejkernel-core" in message
    assert records["ejkernel-core"].state == "ok"


@pytest.mark.parametrize(
    ("fields", "state", "said"),
    [
        ({"name": "'other'"}, "broken", "it calls itself 'other', and its entry point says 'acme'"),
        (
            {"api_level": "99"},
            "incompatible",
            "API level 99, this ejkernel accepts 1 to 3; pip install --upgrade ejkernel-core",
        ),
        ({"operations": "'acme.nowhere'"}, "broken", "it names 'acme.nowhere', which does not exist"),
        ({"operations": "'acme.functions'"}, "broken", "it names 'acme.functions', which does not exist"),
        ({"functions": "'acme.nowhere'"}, "broken", "it names 'acme.nowhere', which does not exist"),
        ({"operations": "'acme'"}, "broken", "operations: 'acme' has no folder with an interface.py"),
        ({"operations": "'not a package'"}, "broken", "operations: got 'not a package', expected the name of a package"),
        ({"operations": "7"}, "broken", "operations: got 7, expected the name of a package"),
        ({"summary": "''"}, "broken", "OperationPack.__init__() got an unexpected keyword argument 'summary'"),
    ],
)
def test_descriptions_that_are_wrong(sealed, found, fields, state, said):
    pack_of(sealed, "acme", **fields)
    records, (message,) = found()
    assert records["ejk-acme"].state == state
    assert said in message
    assert "double" not in catalog.OPERATIONS and "rms_norm" in catalog.OPERATIONS


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('gone')", "raised RuntimeError: gone"),
        ("raise SystemExit('gone')", "raised SystemExit: gone"),
        ("x = 1", "does not answer the hook ejkernel_operations"),
        ("from ejkernel.plugin import *\n@hookimpl\ndef ejkernel_operations(): return 7", "returned int, expected"),
    ],
)
def test_modules_that_are_broken(sealed, found, code, said):
    sealed.add("ejk-acme", "acme = acme_light", {"acme_light": code}, group="ejkernel.operations")
    records, (message,) = found()
    assert records["ejk-acme"].state == "broken" and said in message
    assert len(catalog.OPERATIONS) > 30


@pytest.mark.parametrize("head", ["[ejkernel.operation]", "[ejkernel.Operations]", "[ejkernel.operations"])
def test_a_misspelt_group_is_reported(sealed, found, head):
    (sealed.add("ejk-acme", "", {}) / "entry_points.txt").write_text(f"{head}\nacme = acme\n")
    records, (message,) = found()
    assert records["ejk-acme"].state == "broken" and "expected '[ejkernel.operations]'" in message


def test_an_allow_list_leaves_ours(sealed, found, monkeypatch):
    monkeypatch.setenv("EJKERNEL_PLUGINS", "")
    pack_of(sealed, "acme")
    records, messages = found()
    assert (records["ejk-acme"].state, records["ejkernel-core"].state, messages) == ("disabled", "ok", [])


def test_metadata_of_core_that_is_gone(site, found, monkeypatch):
    for folder in site.path.glob("ejkernel_core*"):
        (folder / "entry_points.txt").unlink()
    _, (message,) = found()
    assert "its own operations are not among the entry points; pip install --force-reinstall ejkernel-core" in message


@pytest.mark.parametrize("platform", ["acme", "beta"])
def test_only_who_brings_an_operation_runs_it_unasked(sealed, found, platform):
    pack_of(sealed, "acme")
    code = "Implementation(operation='double', target='kernels:forward', accepts=())"
    owner = "ejk-acme" if platform == "acme" else "ejk-beta"
    answer = f"Plugin(name='{platform}', api_level=3, summary='', implementations=({code},))"
    module = LIGHT.format(hook="ejkernel_plugin", answer=answer)
    info = sealed.path / f"{owner.replace('-', '_')}-1.0.dist-info"
    if platform == "acme":
        (info / "entry_points.txt").write_text(
            "[ejkernel.operations]\nacme = acme.light\n[ejkernel.plugins]\nacme = acme_light\n"
        )
        (sealed.path / "acme_light.py").write_text(module)
    else:
        sealed.add(owner, "beta = beta_light", {"beta_light": module})
    found()
    registry, records = ejkernel.kernel_registry, ejkernel.kernel_registry.records
    registry.load(discover())
    try:
        forward = ejkernel.explain("double", np.ones((2, 3), np.float32)).forward
        assert (forward.chosen.id if forward.chosen else None) == ("acme" if platform == "acme" else None)
        assert ("third party: ask for platform='beta'" in str(forward)) == (platform == "beta")
    finally:
        registry.load(records)
