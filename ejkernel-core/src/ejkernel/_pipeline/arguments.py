"""How the public functions take their arguments: unknown keywords are refused with the right name, and former positions work."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ejkernel._pipeline.documentation import completed
from ejkernel._pipeline.typecheck import checked
from ejkernel._pipeline.values import check_values, symbolic_size
from ejkernel.errors import suggestion, warn
from ejkernel.utils.integers import narrowed

Function = TypeVar("Function", bound=Callable[..., Any])

_SYNONYMS: tuple[tuple[str, ...], ...] = (
    ("query", "queries", "q", "r"),
    ("key", "keys", "k"),
    ("value", "values", "v"),
    ("key_cache", "k_cache", "key_pages", "k_pages", "key_buffer", "kv_cache", "kv_pages"),
    ("value_cache", "v_cache", "value_pages", "v_pages", "value_buffer", "kv_cache", "kv_pages"),
    ("x", "input", "inputs", "_input", "hidden_states", "hidden", "logits", "u"),
    ("lhs", "x", "a"),
    ("rhs", "w", "weight", "kernel"),
    ("scale", "weight", "gamma"),
    ("offset", "bias", "beta"),
    ("epsilon", "eps", "norm_eps", "rmsnorm_eps", "rms_norm_eps", "variance_epsilon"),
    ("axis", "dim", "axes"),
    ("softmax_scale", "sm_scale", "scale", "attn_scale", "logits_scale", "scaling"),
    ("causal", "is_causal"),
    ("mask", "attn_mask", "attention_mask", "where", "mask_info"),
    ("bias", "attn_bias", "attn_mask", "ab"),
    ("seg_ids", "segment_ids", "seq_idx", "q_segment_ids", "kv_segment_ids", "mask_info"),
    ("dropout_prob", "dropout_p", "dropout_rate", "dropout"),
    ("dropout_seed", "dropout_rng", "dropout_key", "rng"),
    ("cum_seqlens_q", "cu_seqlens_q", "cu_seqlens", "cu_q_lens", "query_start_loc"),
    ("cum_seqlens_k", "cu_seqlens_k", "cu_seqlens_kv"),
    ("max_seqlens_q", "max_seqlen_q"),
    ("max_seqlens_k", "max_seqlen_k", "max_seqlen_kv"),
    ("query_seq_lengths", "query_lengths"),
    ("key_value_seq_lengths", "kv_lens", "context_lens", "context_len", "seq_lens", "lengths", "cache_seqlens", "seqused_k"),
    ("block_tables", "block_table", "page_indices", "page_table"),
    ("sliding_window", "window_size", "local_window_size", "window", "attention_window_size"),
    ("logits_soft_cap", "softcap", "soft_cap", "logit_softcap", "logit_soft_cap", "attn_logits_soft_cap"),
    ("softmax_aux", "sinks", "s_aux", "learnable_sink", "attention_sinks"),
    ("return_lse", "return_residual", "return_residuals", "return_softmax_lse", "save_residuals"),
    ("return_state", "output_final_state", "return_final_states", "return_last_state"),
    ("initial_state", "initial_states", "state", "h0"),
    ("decay", "g", "gk", "w"),
    ("gate", "z"),
    ("use_qk_l2norm", "use_qk_l2norm_in_kernel"),
    ("dt", "delta"),
    ("dt_bias", "delta_bias"),
    ("dt_softplus", "delta_softplus"),
    ("act_fn", "activation"),
    ("targets", "target", "labels"),
    ("lm_head_weight", "weight", "head", "lin_weight"),
    ("lm_head_bias", "bias"),
    ("class_weights", "weight", "ce_weight"),
    ("z_loss", "lse_square_scale"),
    ("student_logits", "student", "input"),
    ("teacher_logits", "teacher", "target"),
    ("interleaved", "rotary_interleaved"),
    ("layout", "tensor_layout", "qkv_layout"),
    ("preferred_element_type", "out_dtype"),
    ("platform", "implementation", "backend"),
    ("cfg", "config", "block_sizes", "num_warps", "num_stages"),
)
"""Words for one thing, here and in jax.nn, PyTorch, flash-attn, flash-linear-attention, mamba_ssm, tokamax and Liger."""

_GLOSSES: Mapping[str, str] = {
    "mask": "True is visible",
    "mask_info": "MaskInfo(dense=mask), MaskInfo.from_segments(ids), ...",
    "bias": "numbers to add",
    "sliding_window": "None, not -1, for no limit",
}
"""What else differs, by our name."""

_INSTEAD: Mapping[str, str] = {
    "alibi_slopes": "flash_attention has it; else add slopes * distances to the scores by bias=, where there is one",
    "enable_gqa": "leave it out: heads are grouped by their numbers",
    "head_first": "leave it out: tokens come before heads",
    "max_seqlen_q": "leave it out: lengths need no bound",
    "max_seqlen_k": "leave it out: lengths need no bound",
    "return_attn_probs": "ejkernel.attention returns the weights",
    "need_weights": "ejkernel.attention returns the weights",
    **dict.fromkeys(
        ("chunk_size", "num_splits", "seq_threshold_3d", "num_par_softmax_segments", "autotune_chunk_candidates"),
        "cfg= holds what only speed depends on",
    ),
}
"""What to do where nothing in the signature fits."""

DISPATCHES = "dispatches"
"""Attribute of a public function: whether platforms implement it."""

REFUSED = "refused_keywords"
"""Attribute of a function: keywords of its signature that it only has to refuse them."""


def public(*formerly_positional: str, dispatches: bool = True) -> Callable[[Function], Function]:
    """Make a function public: keywords that it does not have are refused with the name of the one that is meant, and NumPy
    integers that JAX would wrap are narrowed.

    With `EJKERNEL_TYPECHECK=1` its annotations are checked, too. What all docstrings have in common is added to its own.

    Args:
        formerly_positional: keyword-only arguments that callers of older versions pass by position, in that order.
        dispatches: whether platforms implement it; the catalog of operations reads this where it stands in the source.
    """

    def decorate(function: Function) -> Function:
        run = checked(function)
        parameters = inspect.signature(function).parameters.values()
        names = [parameter.name for parameter in parameters]
        most = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
        limit = most if formerly_positional else sys.maxsize

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if len(args) > limit:
                options = _by_keyword(function.__name__, formerly_positional, args[limit:], options)
                args = args[:limit]
            check_values(function, args, options)
            args = (*map(narrowed, names, args), *args[len(names) :])
            options = {name: narrowed(name, value) for name, value in options.items()}
            try:
                return run(*args, **options)
            except TypeError:
                # With such a keyword the body cannot have run: the error is Python's, not one from inside.
                known = _keywords(function)
                if unknown := [name for name in options if name not in known]:
                    useful = [name for name in known if name not in getattr(function, REFUSED, ())]
                    raise TypeError(_refusal(function.__name__, unknown, useful)) from None
                raise
            except Exception as error:
                if _needs_sizes(error) and (refused := symbolic_size(function, args, options, str(error))) is not None:
                    raise refused from error
                raise

        setattr(call, DISPATCHES, dispatches)
        if function.__doc__:  # which python -OO leaves out
            call.__doc__ = completed(function.__doc__, names)
        return call  # pyright: ignore[reportReturnType]

    return decorate


def pick(given: Mapping[str, Any], names: str) -> dict[str, Any]:
    """Some of a function's arguments: `pick(locals(), "x scale=softmax_scale")` is `{"x": x, "scale": softmax_scale}`.

    In 3.11 and 3.12 a debugger adds later variables to what `locals()` returned: hand it on at once, do not keep it.

    Args:
        given: arguments by name.
        names: which, with a blank between them; `contract=public` for one that gets another name.
    """
    return {contract: given[public] for contract, public in _NAMES[names]}


def split(
    given: Mapping[str, Any], arrays: str, renamed: str = "", *, own: str = ""
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """All arguments of a public function as `invoke` and `over_mesh` take them: `arrays, options, run = split(locals(), "x bias")`.

    It is the function's first statement, before there is any other variable. An argument that is named nowhere is an option: what
    a contract does not know it refuses, so a new option stands in the signature and in the docstring alone.

    Args:
        given: arguments by name.
        arrays: those that hold arrays, as in `pick`.
        renamed: options that the contract calls otherwise, as in `pick`.
        own: arguments that the function itself uses up.

    Returns:
        Arrays and options by the contract's names, and platform, cfg, mesh, in_specs and out_specs as far as the function has them.
    """
    options = dict(given)
    found = {contract: options.pop(public) for contract, public in _NAMES[arrays]}
    run = {name: options.pop(name) for name in _RUN if name in options}
    for contract, public in _NAMES[renamed]:
        options[contract] = options.pop(public)
    for _, name in _NAMES[own]:
        del options[name]
    return found, options, run


_RUN = ("platform", "cfg", "mesh", "in_specs", "out_specs")


class _Names(dict[str, tuple[tuple[str, str], ...]]):
    """Names in a line, parsed once: the contract's and the public one."""

    def __missing__(self, line: str) -> tuple[tuple[str, str], ...]:
        pairs = (name.partition("=") for name in line.split())
        self[line] = tuple((contract, public or contract) for contract, _, public in pairs)
        return self[line]


_NAMES = _Names()


def _needs_sizes(error: Exception) -> bool:
    """Whether code compared symbolic sizes of `jax.export`, or called what takes none; JAX's public modules have no such class."""
    return type(error).__name__ == "InconclusiveDimensionOperation" or (
        isinstance(error, NotImplementedError) and "non-constant size" in str(error)
    )


def _by_keyword(function: str, names: tuple[str, ...], values: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with arguments that stood in former positions."""
    if len(values) > len(names):
        raise TypeError(f"{function} got {len(values) - len(names)} arguments too many by position; name all but the first")
    given = dict(zip(names, values, strict=False))
    if twice := given.keys() & options.keys():
        raise TypeError(f"{function} got several values for {', '.join(sorted(twice))}")
    named = [f"{name}=" for name, value in given.items() if value is not None] or [f"{name}=" for name in given]
    warn(f"{function}: pass {', '.join(named)} by name; a later release will refuse it by position", DeprecationWarning)
    return {**given, **options}


def _keywords(function: Callable[..., Any]) -> list[str]:
    """The keywords that a function takes."""
    known: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            known.append(name)
            continue
        (options,) = typing.get_args(typing.get_type_hints(function)[name])  # Unpack[TypedDict]
        known.extend(typing.get_type_hints(options))
    return known


def _refusal(function: str, unknown: Iterable[str], known: list[str]) -> str:
    return ". ".join(f"{function} has no argument {name!r}{_remedy(function, name, known)}" for name in unknown)


def _remedy(function: str, name: str, known: list[str]) -> str:
    words = dict.fromkeys(word for group in _SYNONYMS if name in group for word in group)
    fitting = [f"{word} ({_GLOSSES[word]})" if word in _GLOSSES else word for word in words if word in known]
    if fitting:
        return f"; it is called {' or '.join(fitting)}"
    if name in _INSTEAD:
        return f"; {_INSTEAD[name]}"
    return suggestion(name, known) or f"; see help(ejkernel.{function})"
