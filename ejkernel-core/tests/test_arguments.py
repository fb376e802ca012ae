"""How public functions take arguments: by their names, which an unknown one leads to, and in the field's order."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re

import numpy as np
import pytest

import ejkernel
from ejkernel import modules
from ejkernel._pipeline import arguments
from ejkernel._pipeline.arguments import pick, public, split
from ejkernel._pipeline.documentation import ARGUMENTS, ERRORS, completed
from ejkernel._plugins.catalog import FACADES, FUNCTIONS, HELPERS
from ejkernel.operations import OPERATIONS, get_operation

X = np.ones((1, 4, 2, 8), np.float32)
PUBLIC = {name: getattr(ejkernel, name) for name in (*FUNCTIONS, *HELPERS)}
CLASSES = {name: getattr(modules, name) for name in modules.__all__ if hasattr(getattr(modules, name), "function")}


@pytest.mark.unsampled
@pytest.mark.parametrize("name", PUBLIC)
def test_an_unknown_keyword_names_the_function(name):
    function = PUBLIC[name]
    with pytest.raises(TypeError, match=f"^{function.__name__} has no argument 'qqqqqq'; see help"):
        function(qqqqqq=1)


@pytest.mark.unsampled
@pytest.mark.parametrize("name", CLASSES)
def test_so_does_one_of_the_class_api(name):
    made, function = CLASSES[name](), CLASSES[name].function
    for call in (made, lambda **options: ejkernel.Executor()(made, **options)):
        with pytest.raises(TypeError, match=f"^{function.__name__} has no argument 'qqqqqq'"):
            call(qqqqqq=1)


@pytest.mark.unsampled
@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        ("flash_attention", "q", "query"),
        ("flash_attention", "scale", "softmax_scale"),
        ("flash_attention", "sm_scale", "softmax_scale"),
        ("flash_attention", "cu_seqlens_q", "cum_seqlens_q"),
        ("flash_attention", "cu_seqlens_k", "cum_seqlens_k"),
        ("flash_attention", "implementation", "platform"),
        ("flash_attention", "window_size", r"sliding_window \(None, not -1, for no limit\)"),
        ("flash_attention", "softcap", "logits_soft_cap"),
        ("flash_attention", "dropout_p", "dropout_prob or dropout_rate"),
        ("flash_attention", "block_table", "block_tables"),
        ("flash_attention", "s_aux", "softmax_aux"),
        ("flash_attention", "attn_mask", r"mask \(True is visible\) or mask_info \(.*\) or bias \(numbers to add\)"),
        ("flash_attention", "segment_ids", r"mask_info \(.*MaskInfo.from_segments\(ids\), ...\)"),
        ("flash_attn_varlen", "is_causal", "causal"),
        ("flash_attn_varlen", "max_seqlen_q", "max_seqlens_q"),
        ("flash_attn_varlen", "softmax_scale", "sm_scale"),
        ("scaled_dot_product_attention", "attn_mask", r"mask \(.*bias \(numbers to add\)"),
        ("unified_attention", "cache_seqlens", "kv_lens"),
        ("unified_attention", "sinks", "softmax_aux"),
        ("page_attention", "k_cache", "key_cache"),
        ("rms_norm", "eps", "epsilon"),
        ("rms_norm", "weight", "scale"),
        ("layer_norm", "bias", "offset"),
        ("softmax", "dim", "axis"),
        ("gla_attention", "output_final_state", "return_state"),
        ("gla_attention", "scale", "softmax_scale"),
        ("gated_delta_rule", "g", "decay"),
        ("gated_delta_rule", "use_qk_l2norm_in_kernel", "use_qk_l2norm"),
        ("state_space_v1", "u", "hidden_states"),
        ("state_space_v1", "delta_softplus", "dt_softplus"),
        ("state_space_v2", "z", "gate"),
        ("state_space_v2", "seq_idx", "seg_ids"),
        ("causal_conv1d", "return_final_states", "return_state"),
        ("fused_cross_entropy", "target", "targets"),
        ("fused_cross_entropy", "weight", "lm_head_weight or class_weights"),
        ("grouped_matmul", "weight", "rhs"),
    ],
)
def test_words_of_other_libraries_lead_to_ours(function, given, said):
    with pytest.raises(TypeError, match=f"^{function} has no argument '{given}'; it is called {said}$"):
        PUBLIC[function](**{given: 1})


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        (
            "attention",
            "alibi_slopes",
            "flash_attention has it; else add slopes \\* distances to the scores by bias=, where there is one",
        ),
        ("flash_attention", "enable_gqa", "leave it out: heads are grouped by their numbers"),
        ("retention", "softmax_scal", "did you mean 'softmax_scale'\\?"),
        ("retention", "attn_mask", "see help\\(ejkernel.retention\\)"),
        ("multi_latent_ragged_page_attention_v2", "softmax_scal", "did you mean 'softmax_scale'\\?"),
    ],
)
def test_where_nothing_fits(function, given, said):
    with pytest.raises(TypeError, match=f"^{function} has no argument '{given}'; {said}$"):
        PUBLIC[function](**{given: 1})


def test_several_unknown_keywords_are_said_at_once():
    with pytest.raises(TypeError, match=r"'eps'; it is called epsilon\. rms_norm has no argument 'weight'; it is called scale"):
        ejkernel.rms_norm(X, eps=1e-5, weight=X[0, 0, 0])


def test_the_table_leads_somewhere():
    """Every group has a word of ours and one of others; every gloss is of an argument that exists."""
    ours = {name for function in PUBLIC.values() for name in inspect.signature(function).parameters}
    for group in arguments._SYNONYMS:
        assert ours & {*group}, group
        assert len(group) == len({*group}) >= 2, group
    assert {*arguments._GLOSSES} <= ours


def test_errors_from_inside_stay_what_they_are():
    inner = TypeError("function() got an unexpected keyword argument 'other'")

    @public()
    def function(x, *, known=None):
        raise inner

    with pytest.raises(TypeError) as raised:
        function(1, known=2)
    assert raised.value is inner
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        function()


@pytest.mark.unsampled
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_is_found_where_it_says(name):
    assert pickle.loads(pickle.dumps(PUBLIC[name])) is PUBLIC[name]


DESCRIBED = [name for name in FUNCTIONS if "\nArgs:\n" in inspect.getdoc(PUBLIC[name])]
"""Those whose docstring does not refer to another's for arguments."""


@pytest.mark.unsampled
@pytest.mark.parametrize("name", DESCRIBED)
def test_a_docstring_has_what_all_have_in_common(name):
    assert len(DESCRIBED) > 50
    text = inspect.getdoc(PUBLIC[name])
    own = inspect.signature(inspect.unwrap(PUBLIC[name])).parameters
    for argument in [name for name in ARGUMENTS if name in own]:
        assert len(re.findall(rf"^    (?:\w+,\s+)*{argument}\b[^:]*:", text, re.MULTILINE)) == 1, argument
    for error in ERRORS if "platform" in own else ():
        assert len(re.findall(rf"^    (?:\w+, )*{error}\b[^:]*:", text, re.MULTILINE)) == 1, error
    classes = [one for one in CLASSES.values() if one.function is PUBLIC[name]]
    assert all(one.__doc__ == PUBLIC[name].__doc__ for one in classes)


def test_common_entries_stand_in_the_order_of_arguments():
    text = """Sum.

        Args:
            a: numbers.
            mesh: devices.

        Source: a book.
        """
    assert (
        completed(text, ["a", "platform", "cfg", "mesh"])
        == f"""Sum.

Args:
    a: numbers.
    platform: {ARGUMENTS["platform"]}
    cfg: {ARGUMENTS["cfg"]}
    mesh: devices.

Raises:
    ValueError: {ERRORS["ValueError"]}
    TypeError: {ERRORS["TypeError"]}
    NoKernelError: {ERRORS["NoKernelError"]}

Source: a book."""
    )
    raising = "Sum.\n\nArgs:\n    a: numbers.\n    platform: its own.\n\nRaises:\n    TypeError: its own."
    more = f"    ValueError: {ERRORS['ValueError']}\n    TypeError: its own.\n    NoKernelError: {ERRORS['NoKernelError']}"
    assert completed(raising, ["a", "platform"]) == raising.replace("    TypeError: its own.", more)
    assert completed("Sum of numbers.", ["a", "platform"]) == "Sum of numbers."
    assert completed("Sum.\n\nArgs:\n    a: numbers.", ["a"]) == "Sum.\n\nArgs:\n    a: numbers."


def test_arguments_in_three_parts():
    def function(x, k, *, scale=1, causal=False, hint=None, platform=None, cfg=None, mesh=None):
        return split(locals(), "query=x k", "softmax_scale=scale", own="hint")

    arrays, options, run = function(2, 3, causal=True, platform="xla")
    assert [*arrays.items()] == [("query", 2), ("k", 3)]
    assert options == {"softmax_scale": 1, "causal": True}
    assert run == {"platform": "xla", "cfg": None, "mesh": None}
    assert pick({"a": 1, "b": 2, "c": 3}, "c=b a") == {"c": 2, "a": 1}
    with pytest.raises(KeyError, match="weight"):
        split({"x": 1}, "x weight")
    with pytest.raises(KeyError, match="hint"):
        split({"x": 1}, "x", own="hint")


def test_an_option_that_the_contract_lacks_is_refused():
    """Options are what is named nowhere, so one that is forgotten in the contract must not be dropped."""

    def function(x, scale=None, offset=None, *, epsilon=1e-6, unheard_of=1, platform=None, cfg=None):
        arrays, options, run = split(locals(), "x scale offset")
        return get_operation("rms_norm").invoke(arrays, options, **run)

    with pytest.raises(TypeError, match="unexpected keyword argument 'unheard_of'"):
        function(X)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_a_contract_takes_no_other_keywords(name):
    parameters = inspect.signature(get_operation(name).canonicalise).parameters.values()
    assert not [one for one in parameters if one.kind is one.VAR_KEYWORD]


def test_arguments_are_taken_before_there_are_other_variables():
    """Of `split(locals(), ...)` and `function(**locals())` every variable would be an option."""
    found = 0
    for module in sorted({*FACADES.values()}):
        for function in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
            assigned = []
            for statement in function.body if isinstance(function, ast.FunctionDef) else ():
                said = ast.unparse(statement)
                if "split(locals()" in said or "**locals()" in said:
                    assert not assigned, f"{module}.{function.name} assigns {assigned} before it takes its arguments"
                    found += 1
                names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
                assigned += [node.id for node in names if isinstance(node.ctx, ast.Store)]
    assert found > 40


VALUES = {"value", "values", "v", "key_value", "keys_values", "value_cache", "value_buffer", "kv_pages"}
"""What attention and recurrences read from, in the field's words."""

IN_BETWEEN = {"ragged_gated_delta_rule": 4, "flash_attn_varlen": 3}
"""How many optional arguments stand among the field's positions: a decay, key lengths and longest sequences."""


@pytest.mark.unsampled
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if VALUES & {*inspect.signature(PUBLIC[name]).parameters}])
def test_what_is_optional_in_attention_is_a_keyword(name):
    parameters = inspect.signature(PUBLIC[name]).parameters.values()
    positional = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    optional = [one.name for one in positional if one.default is not one.empty]
    assert len(optional) == IN_BETWEEN.get(name, 0), optional


def test_former_positions_warn_of_their_names():
    @public("a", "b", "c")
    def function(x: int, *, a: object = None, b: object = None, c: object = None, d: object = None) -> object:
        return x, a, b, c, d

    with pytest.warns(DeprecationWarning, match="^function: pass a=, c= by name; a later release will refuse it by position$"):
        assert function(1, 2, None, 3, d=4) == (1, 2, None, 3, 4)
    with pytest.warns(DeprecationWarning, match="pass a= by name"):
        assert function(1, None, c=5) == (1, None, None, 5, None)
    assert function(1, a=2) == (1, 2, None, None, None)
    with pytest.raises(TypeError, match="function got several values for a"):
        function(1, 2, a=3)
    with pytest.raises(TypeError, match="function got 1 arguments too many by position"):
        function(1, 2, 3, 4, 5)
