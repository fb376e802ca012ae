"""One small call of every public function, with the axes of its arrays: those that every setting of JAX is tried on."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel._plugins.catalog import FUNCTIONS
from ejkernel.operations import OPERATIONS, get_operation, operation_module
from ejkernel.testing.shapes import bound_shapes

SIZES = {
    "b": 4,
    "t": 8,
    "h": 4,
    "m": 32,
    "k": 2,
    "d": 16,
    "v": 16,
    "n": 6,
    "r": 2,
    "p": 4,
    "s": 4,
    "w": 2,
    "g": 2,
    "c": 8,
    "e": 4,
    "f": 4,
}
"""Of named axes: batch, length, heads, many heads, key heads, channels, new tokens, requests, pages, page size, pages of a request,
groups, and heads of keys and values in one array (f)."""


@dataclasses.dataclass(frozen=True)
class PublicCall:
    """A call with its array arguments in order of the signature; `differentiable`: it has gradients."""

    name: str
    arrays: dict[str, np.ndarray]
    axes: dict[str, str]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    differentiable: bool = True

    def run(self, arrays: dict[str, Any]) -> Any:
        return getattr(ejkernel, self.name)(**arrays, **self.options)

    def in_dtype(self, dtype: Any) -> dict[str, Any]:
        """The arrays in JAX, floating ones in this dtype."""
        return {
            name: jnp.asarray(value, dtype if value.dtype == np.float32 else value.dtype) for name, value in self.arrays.items()
        }

    def without(self, axis: str) -> PublicCall:
        """The call with arrays that have no elements along a named axis."""
        cut = {name: [slice(0 if each == axis else None) for each in axes.split()] for name, axes in self.axes.items()}
        return dataclasses.replace(self, arrays={name: value[*cut[name]] for name, value in self.arrays.items()})

    @property
    def floating(self) -> list[str]:
        """Arrays that have gradients."""
        return [name for name, value in self.arrays.items() if value.dtype == np.float32 and self.differentiable]


def _floats(name: str, axes: str) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return np.asarray(rng.standard_normal([SIZES[axis] if axis in SIZES else int(axis) for axis in axes.split()]), np.float32)


def _call(function: str, arrays: str, options: dict[str, Any] | None = None, **given: Any) -> PublicCall:
    """A call whose arrays are written as `"query: b t h d, key: b t k d"`; `given` holds those that are not normal, by name:
    values, or a function of what would be normal."""
    axes = {name.strip(): each.strip() for name, _, each in (part.partition(":") for part in arrays.split(","))}
    values = {}
    for name, each in axes.items():
        made = given.get(name)
        values[name] = (
            _floats(name, each) if made is None else made(_floats(name, each)) if callable(made) else np.asarray(made)
        )
    return PublicCall(function, values, axes, options or {})


def _negative(value: np.ndarray) -> np.ndarray:
    return -np.abs(value)


def _in_float8(value: np.ndarray) -> np.ndarray:
    return value.astype(jnp.float8_e4m3fn)


def _share(value: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-value))


def _unit(value: np.ndarray) -> np.ndarray:
    return value / np.linalg.norm(value, axis=-1, keepdims=True)


_QKV = "query: b t h d, key: b t k d, value: b t k d"
_SEQUENCE = "query: b t h d, key: b t h d, value: b t h v"
_ANGLES = "cos: t c, sin: t c"
_NEW = "keys: n k d, values: n k d"
_PAGES = "key_cache: p s k d, value_cache: p s k d"
_SERVED = "kv_lens: r, block_tables: r w, query_start_loc: 3"
_LATENT = "query: b t h 20, key_value: b t d, w_kc: d h 16, w_vc: d h v, b_k: b t e"

_CHOICES = np.array([[0, 2], [1, 3], [3, 0], [2, 1], [-1, 0], [1, 2]], np.int32)
_KV_LENS = np.array([6, 3], np.int32)
_TABLES = np.array([[0, 2], [1, 3]], np.int32)
_STARTS = np.array([0, 4, 6], np.int32)
_SERVE = {"kv_lens": _KV_LENS, "block_tables": _TABLES, "query_start_loc": _STARTS}
_FLAT = {**_SERVE, "block_tables": _TABLES.reshape(-1), "distribution": np.array([0, 2, 2], np.int32)}


def _dense() -> list[PublicCall]:
    return [
        _call("rms_norm", "x: b t d, scale: d"),
        _call("gated_rms_norm", "x: b t d, gate: b t d, scale: d", {"norm_before_gate": False}),
        _call("layer_norm", "x: b t d, scale: d, offset: d"),
        _call("fused_add_rms_norm", "x: b t d, residual: b t d, scale: d"),
        _call("softmax", "x: b t d"),
        _call("gated_linear_unit", "gate: b t d, up: b t d", {"activation": "gelu"}),
        _call("rope", f"x: b t h d, {_ANGLES}"),
        _call("llama_rope", f"q: b t h d, k: b t k d, {_ANGLES}"),
        _call("fused_qk_norm_rope", f"q: b t h d, k: b t k d, {_ANGLES}, q_scale: d, k_scale: d"),
        _call("mean_pooling", "x: b t d"),
        _call("causal_conv1d", "x: b t d, weight: d 4, bias: d", {"activation": "silu"}),
        _call("fused_cross_entropy", "logits: b t d, targets: b t", targets=lambda x: np.abs(x * 4).astype(np.int32)),
        _call(
            "token_logprobs",
            "hidden: b t d, lm_head_weight: d v, targets: b t",
            {"temperature": 0.7},
            targets=lambda x: np.abs(x * 4).astype(np.int32),
        ),
        _call("fused_kl_divergence", "student_logits: b t d, teacher_logits: b t d"),
        _call("grouped_matmul", "lhs: n d, rhs: g d v, group_sizes: g", group_sizes=np.array([4, 2], np.int32)),
        _call("moe_route", "logits: b t", {"k": 2, "scoring": "sigmoid"}),
        _call("moe_permute", "x: n d, experts: n g", {"num_experts": 4}, experts=_CHOICES),
        _call(
            "moe_unpermute",
            "rows: 12 d, positions: n g, weights: n g",
            positions=np.argsort(_CHOICES.reshape(-1)).reshape(6, 2).astype(np.int32),
        ),
        _call(
            "quantized_matmul",
            "x: b t 64, w: 64 8, scales: 64 1, zeros: 64 1",
            {"group_size": 32, "bits": 8, "mode": "affine"},
            w=lambda x: np.abs(x * 1000).astype(np.uint32),
        ),
        _call("scaled_matmul", "lhs: b t d, rhs: d v, lhs_scale: b t, rhs_scale: v", lhs=_in_float8, rhs=_in_float8),
        _call("fused_linear", "x: b t d, weight: v d, norm_scale: d, bias: v, residual: b t v"),
        dataclasses.replace(_call("newton_schulz", "x: b n d", {"dtype": "float32"}), differentiable=False),
        dataclasses.replace(_call("quantize_float8", "x: n d", {"transposed": True}), differentiable=False),
        dataclasses.replace(
            _call(
                "sample_tokens",
                "logits: b d, key: 2",
                {"top_k": 3, "top_p": 0.9, "return_logprobs": True},
                key=np.array([1, 2], np.uint32),
            ),
            differentiable=False,
        ),
        _call("flash_attention", _QKV, {"causal": True}),
        _call("attention", _QKV, {"causal": True, "dropout_prob": 0.25, "dropout_rng": 3, "deterministic": False}),
        _call("scaled_dot_product_attention", _QKV, {"causal": True}),
        _call("flash_attn_varlen", "q: n h d, k: n k d, v: n k d, cu_seqlens_q: 3", {"causal": True}, cu_seqlens_q=_STARTS),
        _call("blocksparse_attention", "query: b h t d, key: b k t d, value: b k t d"),
        _call("ring_attention", _QKV, {"causal": True}),
        _call("flash_mla", _LATENT, {"causal": True}),
        _call("multi_head_latent_attention", _LATENT, {"causal": True}),
        _call(
            "deepseek_attn",
            "query: b t h d, key_value: b t d, w_kc: d h 16, w_vc: d h v, query_index: b t h c, key_index: b t c, "
            "index_weights: b t h",
            {"index_topk": 4},
        ),
        *(
            _call(name, f"{arrays}, g_cmp: b t m, g_slc: b t m", {"block_size": 4}, g_cmp=_share, g_slc=_share)
            for name, arrays in (
                ("native_sparse_attention", "query: b t m d, key: b t k d, value: b t k d"),
                ("native_spare_attention", "q: b t m d, k: b t k d, v: b t k d"),
            )
        ),
        _call(
            "apply_native_sparse_attention",
            "query: b t m d, key: b t k d, value: b t k d, block_indices: b t k 2",
            {"block_size": 4},
            block_indices=np.broadcast_to(np.array([0, 1], np.int32), (4, 8, 2, 2)),
        ),
    ]


def _recurrences() -> list[PublicCall]:
    return [
        *(_call(name, f"{_SEQUENCE}, g: b t h d", g=_negative) for name in ("gla", "gla_attention")),
        *(
            _call(name, f"{_SEQUENCE}, g: b t h, gk: b t h d", g=_negative, gk=_negative)
            for name in ("recurrent", "recurrent_attention")
        ),
        _call("retention", _SEQUENCE),
        *(_call(name, _SEQUENCE, {"layer_idx": 1, "num_layers": 4}) for name in ("lightning_attention", "lightning_attn")),
        *(
            _call(name, f"{_SEQUENCE}, beta: b t h, decay: {decay}", beta=_share, decay=_negative)
            for name, decay in (("gated_delta_rule", "b t h"), ("kernel_delta_attention", "b t h d"))
        ),
        _call(
            "gated_delta_product",
            "query: b t h d, key: b 16 h d, value: b 16 h v, beta: b 16 h, decay: b t h",
            {"num_householder": 2},
            beta=_share,
            decay=_negative,
        ),
        _call("mlstm", f"{_SEQUENCE}, input_gate: b t h, forget_gate: b t h"),
        _call(
            "mamba3",
            "x: b t h d, A: b t h, B: b t k c, C: b t k c, D: h, dt: b t h, trap: b t h, angles: b t 1 2, B_bias: h c, C_bias: h c",
            A=_negative,
            dt=np.abs,
        ),
        _call("rwkv4", "w: d, u: d, k: b t d, v: b t d", w=_negative),
        _call("rwkv6", "r: b t h d, k: b t h d, v: b t h v, w: b t h d, u: h d", w=_negative),
        _call("rwkv7", "r: b t h d, w: b t h d, k: b t h d, v: b t h v, a: b t h d, b: b t h d", w=_negative, a=_unit, b=_unit),
        _call(
            "rwkv7_mul",
            "r: b t h d, w: b t h d, k: b t h d, v: b t h v, kk: b t h d, a: b t h d",
            w=_negative,
            kk=_unit,
            a=_share,
        ),
        _call("state_space_v1", "hidden_states: b t d, A: d c, B: b t c, C: b t c, D: d, dt: b t d", A=_negative, dt=np.abs),
        _call(
            "state_space_v2",
            "x: b t h d, A: h, B: b t g c, C: b t g c, D: h, dt: b t h",
            {"n_groups": 2},
            A=_negative,
            dt=np.abs,
        ),
        _call(
            "ragged_gated_delta_rule",
            "query: n h d, key: n h d, value: n h v, beta: n h, decay: n h, recurrent_state: 3 h d v, query_start_loc: 3, "
            "state_indices: r",
            beta=_share,
            decay=_negative,
            query_start_loc=_STARTS,
            state_indices=np.array([1, 0], np.int32),
        ),
    ]


def _serving() -> list[PublicCall]:
    latent = "queries_nope: n h d, queries_pe: n h e, keys_values: n d, keys_pe: n e, kv_cache: p 4 1 256"
    latent += ", kv_lens: r, block_tables: 4, query_start_loc: 3, distribution: 3"
    return [
        _call(
            "page_attention",
            f"query: r h d, {_PAGES}, context_lens: r, block_tables: r w",
            {"layout": "pthd"},
            context_lens=_KV_LENS,
            block_tables=_TABLES,
        ),
        _call(
            "prefill_page_attention",
            f"query: n h d, {_PAGES}, context_len: , page_indices: w",
            {"layout": "pthd"},
            context_len=np.array(6, np.int32),
            page_indices=np.array([1, 2], np.int32),
        ),
        _call("unified_attention", f"queries: n h d, {_PAGES}, {_SERVED}", **_SERVE),
        _call(
            "decode_attention",
            "query: r h d, key_buffer: 16 k d, value_buffer: 16 k d, req_to_tokens: r 8, seq_lens: r",
            req_to_tokens=np.arange(16, dtype=np.int32).reshape(2, 8),
            seq_lens=_KV_LENS,
        ),
        _call(
            "ragged_decode_attention",
            "query: b h d, key: b t k d, value: b t k d, sequence_start: b, sequence_end: b",
            sequence_start=np.array([0, 1, 2, 0], np.int32),
            sequence_end=np.array([3, 8, 4, 6], np.int32),
        ),
        _call(
            "ragged_page_attention_v2",
            "queries: n h d, kv_pages: p s f d, context_lens: r, block_tables: r w, query_start_loc: 3, num_seqs: 1",
            context_lens=_KV_LENS,
            block_tables=_TABLES,
            query_start_loc=_STARTS,
            num_seqs=np.array([2], np.int32),
        ),
        _call(
            "ragged_page_attention_v3",
            f"queries: n h d, {_NEW}, kv_cache: p s f 1 128, kv_lens: r, block_tables: 4, query_start_loc: 3, distribution: 3",
            **_FLAT,
        ),
        _call("chunked_prefill_paged_decode", f"queries: n h d, {_NEW}, {_PAGES}, {_SERVED}", **_SERVE),
        _call("paged_cache_update", f"{_NEW}, {_PAGES}, {_SERVED}", **_SERVE),
        *(
            _call(name, latent, **_FLAT)
            for name in ("multi_latent_ragged_page_attention", "multi_latent_ragged_page_attention_v2")
        ),
    ]


def _of_its_operation(name: str) -> PublicCall:
    """The call of a function that has no row above: its operation's first case that fits the sizes' names."""
    case, call = next((case, bound_shapes(name, case, "float32")[1]) for case in operation_module(name, "cases").CASES)
    arrays = {array: np.asarray(value) for array, value in case.arrays(np.random.default_rng(0)).items()}
    operation = get_operation(name)
    dims = operation.dimensions(call)  # of the contract, which may put axes before those of the public function
    axes = {array: " ".join(dims[array].replace("?", "").split()[-value.ndim :]) for array, value in arrays.items()}
    return PublicCall(name, arrays, axes, dict(case.options), differentiable=bool(operation.differentiable))


SERVING = {call.name: call for call in _serving()}
_WRITTEN = {call.name: call for call in (*_dense(), *_recurrences(), *SERVING.values())}
CALLS = {**_WRITTEN, **{name: _of_its_operation(name) for name in FUNCTIONS if name not in _WRITTEN and name in OPERATIONS}}

FROM_HIDDEN = {
    "fused_cross_entropy(hidden=)": _call(
        "fused_cross_entropy",
        "hidden: b t d, lm_head_weight: d v, targets: b t",
        targets=lambda x: np.abs(x * 4).astype(np.int32),
    ),
    "fused_cross_entropy(hidden=, reduction='none')": _call(
        "fused_cross_entropy",
        "hidden: b t d, lm_head_weight: d v, targets: b t",
        {"reduction": "none"},
        targets=lambda x: np.abs(x * 4).astype(np.int32),
    ),
    "fused_kl_divergence(student_hidden=)": _call(
        "fused_kl_divergence", "student_hidden: b t d, student_head: d v, teacher_hidden: b t c, teacher_head: c v"
    ),
}
"""Functions whose call above has logits, from hidden states."""
