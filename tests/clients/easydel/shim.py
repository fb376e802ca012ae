"""What EasyDeL 0.3.0 takes for granted and ejkernel does not promise; import this before `easydel`.

It asserts one version of another library of this name, and imports private paths of that library. Neither belongs into the
product, so both are put in place here, for the test alone.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax

import ejkernel
import ejkernel.callib
import ejkernel.modules

EXPECTED_VERSION = "0.0.78"
"""The version that `import easydel` asserts."""

IMPORTED = (
    "GroupedMatmulConfig",
    "UnifiedAttentionConfig",
    "attention",
    "blocksparse_attention",
    "flash_attention",
    "gated_delta_rule",
    "grouped_matmul",
    "multi_latent_ragged_page_attention",
    "multi_latent_ragged_page_attention_v2",
    "quantized_matmul",
    "ragged_decode_attention",
    "ragged_gated_delta_rule",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
    "ring_attention",
    "scaled_dot_product_attention",
    "state_space_v1",
    "state_space_v2",
    "unified_attention",
)
"""Names that EasyDeL imports from `ejkernel.modules` when it is imported itself."""

QUANTIZATION = ("dequantize", "prepack_quantized_weights", "quantize")

PATCHED_IN_TRANSFORMERS = ("dbrx", "glm4v_moe", "llama4", "phimoe", "qwen3_5_moe", "qwen3_next")
"""Model packages whose PyTorch classes EasyDeL changes when it is imported, which fails where there is no PyTorch."""


def install() -> dict[str, list[str]]:
    """Make `import easydel` work; returns which of the names that it imports are missing here, by module."""
    # EasyDeL adds flags to XLA_FLAGS that this jaxlib does not know; JAX reads them when its backend starts.
    jax.devices()
    for name in PATCHED_IN_TRANSFORMERS:
        sys.modules[f"transformers.models.{name}"] = None  # pyright: ignore[reportArgumentType]
    ejkernel.__version__ = EXPECTED_VERSION
    signature = _module("ejkernel.callib._ejit")
    signature._get_args_signature = _arguments_signature
    missing = {"ejkernel.modules": _fill("ejkernel.modules", IMPORTED), "ejkernel.quantization": []}
    missing["ejkernel.quantization"] = _fill("ejkernel.quantization", QUANTIZATION)
    _private_ragged_delta_rule()
    return {module: names for module, names in missing.items() if names}


def _fill(module: str, names: tuple[str, ...]) -> list[str]:
    """Give a module the names that it lacks, as functions that say so when they are called."""
    found = _module(module)
    missing = [name for name in names if not hasattr(found, name)]
    for name in missing:
        setattr(found, name, _absent(f"{module}.{name}"))
        if module == "ejkernel.modules":
            setattr(_module("ejkernel.modules.operations"), name, getattr(found, name))
    return missing


def _absent(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not in this version of ejkernel")

    return call


def _module(name: str) -> Any:
    """A module, or a new and empty one of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module = types.ModuleType(name)
        module.__path__ = []  # pyright: ignore[reportAttributeAccessIssue]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(_module(parent), child, module)
        return module


def _arguments_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A text that tells arguments apart by structure, shapes and dtypes, and plain values by themselves."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    shown = [f"{leaf.dtype}{leaf.shape}" if hasattr(leaf, "shape") else repr(leaf) for leaf in leaves]
    return hashlib.sha256(f"{tree} {shown}".encode()).hexdigest()


def _private_ragged_delta_rule() -> None:
    """The two private functions of the packed delta rule, over the public one."""
    root = "ejkernel.kernels"
    decode = _module(f"{root}._pallas.tpu.ragged_gated_delta_rule._interface")
    prefill = _module(f"{root}._xla.ragged_gated_delta_rule._xla_impl_fwd")
    decode._decode_path = _decode_path
    prefill._ragged_gdr_chunked_prefill = _ragged_gdr_chunked_prefill


def _decode_path(q: Any, k: Any, v: Any, beta: Any, decay: Any, state: Any, slots: Any, use_qk_l2norm: Any) -> Any:
    """One new token of every request."""
    starts = jax.numpy.arange(q.shape[0] + 1, dtype="int32")
    return _packed(q, k, v, beta, decay, state, starts, slots, 1, use_qk_l2norm)


def _ragged_gdr_chunked_prefill(
    q: Any, k: Any, v: Any, beta: Any, decay: Any, state: Any, starts: Any, slots: Any, chunk: Any, use_qk_l2norm: Any
) -> Any:
    out, new_state = _packed(q, k, v, beta, decay, state, starts, slots, chunk, use_qk_l2norm)
    return new_state, out


def _packed(q: Any, k: Any, v: Any, beta: Any, decay: Any, state: Any, starts: Any, slots: Any, chunk: Any, norm: Any) -> Any:
    return ejkernel.modules.ragged_gated_delta_rule(  # pyright: ignore[reportAttributeAccessIssue]
        query=q,
        key=k,
        value=v,
        beta=beta,
        decay=decay,
        recurrent_state=state,
        query_start_loc=starts,
        state_indices=slots,
        chunk_size=chunk,
        use_qk_l2norm=norm,
    )
