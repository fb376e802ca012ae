"""Annotations of the public functions: checked at run time when asked for, and the same in every place that repeats them."""

from __future__ import annotations

import inspect
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import modules
from ejkernel._pipeline import typecheck
from ejkernel._plugins.catalog import FACADES
from ejkernel.operations import OPERATIONS, get_operation
from ejkernel.typing import Attended, Keys, Queries, Rows, RowScale, RowsOutput

Q = np.ones((1, 8, 2, 4), np.float32)


def unused(x: Rows, scale: RowScale | None = None, *, width: int = 1) -> RowsOutput:
    return jnp.asarray(x)


def test_suites_run_with_checks_on():
    assert typecheck.on()
    assert hasattr(ejkernel.rms_norm, "__wrapped__")
    assert ejkernel.RmsNorm.function is ejkernel.rms_norm


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((np.ones(3, int),), {}, r"unused: x is int64\[3\], but annotated"),
        ((np.ones(3, np.float32), np.ones(3, int)), {}, r"scale is int64\[3\], but annotated"),
        ((np.ones(3, np.float32),), {"width": "1"}, "width is '1' of type str, but annotated <class 'int'>"),
    ],
)
def test_what_the_annotation_excludes_raises(arguments, options, said):
    with pytest.raises(ejkernel.AnnotationError, match=said):
        typecheck.checked(unused)(*arguments, **options)


def test_result_that_is_not_as_annotated_raises():
    def halved(x: Rows) -> RowsOutput:
        return jnp.asarray(x)[1:]

    with pytest.raises(ejkernel.AnnotationError, match=r"halved: the result is float32\[2\], but annotated"):
        typecheck.checked(halved)(np.ones(3, np.float32))


def test_an_axis_has_one_size_in_a_signature():
    def attend(query: Queries, key: Keys) -> Attended:
        raise NotImplementedError

    def accepted(query: Queries, key: Keys) -> None:
        return None

    typecheck.checked(accepted)(Q, Q)
    with pytest.raises(ejkernel.AnnotationError, match=r"key is float32\[1,8,2,3\]"):
        typecheck.checked(accepted)(Q, Q[..., :3])
    with pytest.raises(NotImplementedError):
        typecheck.checked(attend)(Q, Q)


def test_own_refusals_come_first():
    with pytest.raises(ValueError, match="causal_alignment: got 'middle'"):
        ejkernel.flash_attention(Q, Q, Q, causal=True, causal_alignment="middle")  # pyright: ignore


def test_a_record_that_is_not_as_annotated_raises():
    record = ejkernel.operations.rms_norm.interface.RmsNormInputs(jnp.ones((1, 2, 4)), jnp.ones((1, 4, 1)))
    with pytest.raises(ejkernel.AnnotationError, match=r"NormInputs.scale is float32\[1,4,1\]"):
        typecheck.check_records(record)


def test_what_is_accepted_under_checks():
    seen = [
        ejkernel.flash_attention(Q, jnp.asarray(Q), Q, softmax_scale=1, sliding_window=[np.int32(3), 0], causal=np.True_),
        jax.jit(lambda q: ejkernel.flash_attention(q, q, q, softmax_scale=np.float32(1), sliding_window=(3, 0)))(Q),
        jax.vmap(lambda q: ejkernel.flash_attention(q, q, q, softmax_scale=1.0, sliding_window=(3, 0), causal=True))(Q[None])[
            0
        ],
    ]
    np.testing.assert_allclose(seen[0], seen[2], rtol=1e-6)
    assert seen[1].shape == Q.shape
    shape = jax.ShapeDtypeStruct(Q.shape, Q.dtype)
    assert ejkernel.explain("flash_attention", shape, shape, shape).chosen == "xla"


def test_without_the_variable_nothing_is_checked(python):
    output = python(
        """
        import sys
        import ejkernel
        assert "jaxtyping" not in sys.modules
        from ejkernel.modules.norms import rms_norm
        assert ejkernel.rms_norm is rms_norm
        assert ejkernel.RmsNorm.function is rms_norm
        ejkernel.rms_norm(__import__("numpy").ones((2, 4), "float32"))
        print("beartype" in sys.modules)
        """,
        EJKERNEL_TYPECHECK="off",
    )
    assert output.strip() == "False"


def test_missing_beartype_is_one_clear_error(python):
    code = """
        import sys
        sys.modules["beartype"] = None
        import ejkernel
        ejkernel.rms_norm
        """
    output = python(code, fails=True, EJKERNEL_TYPECHECK="1")
    assert output.strip().endswith("ImportError: EJKERNEL_TYPECHECK=1 needs beartype: pip install 'ejkernel-core[testing]'")


PUBLIC = {name: getattr(modules, name) for name in modules.__all__ if name[0].islower()}


@pytest.mark.parametrize("name", PUBLIC)
def test_no_public_signature_says_any(name):
    function = inspect.unwrap(PUBLIC[name])
    hints = typing.get_type_hints(function)
    assert {*inspect.signature(function).parameters, "return"} == {*hints}
    assert not [argument for argument, hint in hints.items() if hint is typing.Any]


BY_FLAG = {"return_logprobs", "return_lse", "return_residual", "return_state"}
FLAGGED = [name for name, function in PUBLIC.items() if BY_FLAG & {*inspect.signature(function).parameters}]
OVERLOADED = [name for name in PUBLIC if typing.get_overloads(inspect.unwrap(PUBLIC[name]))]


@pytest.mark.parametrize("name", FLAGGED)
def test_overloads_say_what_the_signature_says(name):
    """Options that overloads take together have the names and types of the function's own."""
    function = inspect.unwrap(PUBLIC[name])
    own = typing.get_type_hints(function)
    (flag,) = BY_FLAG & {*own}
    results = []
    for overload in typing.get_overloads(function):
        said = typing.get_type_hints(overload)
        for options in typing.get_args(said.pop("options", None)):
            said |= typing.get_type_hints(options)
        results.append((typing.get_args(said.pop(flag)), said.pop("return")))
        assert said == {name: hint for name, hint in own.items() if name not in (flag, "return")}
        parameters = inspect.signature(overload).parameters
        for argument, parameter in inspect.signature(function).parameters.items():
            if argument in parameters and argument != flag:
                assert parameters[argument].default == parameter.default
    (without, single), (with_it, pair), (_, either) = results
    assert (without, with_it) == ((False,), (True,))
    assert either == own["return"] == typing.Union[single, pair]  # noqa: UP007 - built from values


def test_flags_that_change_the_result_are_overloaded():
    assert {*OVERLOADED} == {*FLAGGED, "paged_cache_update"}


def test_caches_of_scales_that_change_the_result_are_overloaded():
    """Of `paged_cache_update`, overloads narrow the scales and have the signature's other arguments and defaults."""
    function = inspect.unwrap(ejkernel.paged_cache_update)
    own, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    scales = {"k_scale", "v_scale", "k_scale_cache", "v_scale_cache"}
    results = []
    for overload in typing.get_overloads(function):
        said = typing.get_type_hints(overload)
        results.append(said.pop("return"))
        assert {*said} == {*parameters}
        assert {n: hint for n, hint in said.items() if n not in scales} == {n: own[n] for n in said if n not in scales}
        for argument, parameter in inspect.signature(overload).parameters.items():
            assert parameter.default in (parameters[argument].default, inspect.Parameter.empty)
    assert own["return"] == typing.Union[tuple(results)]  # noqa: UP007 - built from values


@pytest.mark.tree
def test_checkers_see_every_facade():
    """What is found at run time by the modules' own `__all__` is imported for checkers by name."""
    source = inspect.getsource(modules)
    imported = {*re.findall(r"^    from (ejkernel\.modules\.[\w.]+) import \*$", source, re.MULTILINE)}
    assert imported == {*FACADES.values(), "ejkernel.modules.operations.configs"}
    assert all(getattr(ejkernel, name) is not None for name in ejkernel.__all__)
    assert {*FACADES} <= {*ejkernel.__all__}


def test_star_import_brings_the_public_functions(python):
    output = python(
        """
        from ejkernel import *
        import ejkernel
        print(all(globals()[name] is getattr(ejkernel, name) for name in (*ejkernel.modules.FUNCTIONS, "MaskInfo", "use")))
        """
    )
    assert output.strip() == "True"


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_field_of_a_record_names_its_axes(name):
    """A field that holds an array has a shape; annotations resolve."""
    operation = get_operation(name)
    for record in (operation.Inputs, operation.Outputs):
        hints = typing.get_type_hints(record)
        assert {*hints} == {*record._fields}
        assert all(isinstance(hint.dim_str, str) for hint in hints.values())
