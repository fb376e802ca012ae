"""The launches of `delta_rule` in the general form, with a or b of its own, by chunks.

Every call becomes the plain recurrence `S <- diag(exp(decay)) S + a (b^T S) + k v^T`, `out = S^T q` for all heads, in JAX; what is
made of the arrays for that is differentiated by JAX. A chunk of tokens is affine in the state before it (the WY form of pairs, cf.
Yang et al., Gated Delta Networks, 2025, and the DPLR form of Peng et al., RWKV-7 "Goose", 2025).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.call import ArraySpec
from ejkernel.operations.delta_rule.interface import DeltaRuleCall, DeltaRuleInputs, DeltaRuleOutputs
from ejkernel.operations.delta_rule.lengths import divided_by_length
from ejkernel_triton._blocks import dot_block
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.delta_rule.config import Config, GradientConfig
from ejkernel_triton.delta_rule.general_gradients import general_gradient_kernel, general_value_kernel
from ejkernel_triton.delta_rule.general_prepare import general_prepare_kernel
from ejkernel_triton.delta_rule.general_scan import general_scan_backward_kernel, general_scan_kernel
from ejkernel_triton.delta_rule.problem import TOKENS, Problem, beside, segment_marks, where


class _Prepared(NamedTuple):
    """What `general_prepare_kernel` made, with its names.

    read, read_query, write_key, write_a `[b, t, H, d]`; totals `[b, chunks, H, d]`; held, out `[b, t, H, v]`; the others, where
    they are kept, `[b, chunks, H, chunk, chunk]`.
    """

    read: Any
    read_query: Any
    write_key: Any
    write_a: Any
    totals: Any
    held: Any
    out: Any
    inverse: Any
    scores_key: Any
    scores_a: Any
    reads_key: Any


def _plain(call: DeltaRuleCall, marks: tuple[Any, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """query, key, value, decay, a and b of the plain recurrence, for all heads, in the dtype of products (decays in their own).

    marks: which tokens take part, and before which the state becomes 0; None for all, and none.
    """
    part, fresh = marks
    dtype = jnp.bfloat16 if call.query.dtype == "bfloat16" else jnp.float32

    def every_head(array: Any) -> Any:
        array = array if part is None else where(part, array)
        return array if array.shape[2] == call.heads else jnp.repeat(array, call.heads // array.shape[2], axis=2)

    given = {name: every_head(array) for name, array in arrays.items()}
    wide = {name: array.astype(jnp.float32) for name, array in given.items()}
    query, key = wide["query"], wide["key"]
    if call.use_qk_l2norm:
        query, key = divided_by_length(query), divided_by_length(key)
    decay = given.get("decay", jnp.zeros((1, 1, 1), dtype))
    decay = jnp.broadcast_to(decay if decay.ndim == 4 else decay[..., None], key.shape)
    if fresh is not None:
        decay = jnp.where(beside(fresh, decay), -jnp.inf, decay)
    stored = key * wide["beta"][..., None] if "beta" in wide else key
    read = wide["b"] if "b" in wide else jnp.exp(decay.astype(jnp.float32)) * key
    made = {
        "query": query * call.softmax_scale,
        "key": stored,
        "value": wide["value"],
        "a": wide.get("a", -stored),
        "b": read if fresh is None else where(~fresh, read),
    }
    return {**{name: array.astype(dtype) for name, array in made.items()}, "decay": decay}


def _marks(call: DeltaRuleCall, inputs: DeltaRuleInputs) -> tuple[Any, Any]:
    if inputs.seg_ids is not None:
        return segment_marks(call, inputs)
    if inputs.cu_seqlens is None:
        return None, None
    return jnp.arange(call.query.shape[1], dtype=jnp.int32)[None] < inputs.cu_seqlens[:, -1:], None


def _tokens(inputs: DeltaRuleInputs) -> dict[str, Any]:
    return {name: getattr(inputs, name) for name in TOKENS if getattr(inputs, name) is not None}


class _General(Problem):
    """The plain recurrence of a call."""

    def __init__(self, call: DeltaRuleCall, inputs: DeltaRuleInputs, plain: dict[str, Any], chunk: int) -> None:
        specs = {name: ArraySpec.of(array) for name, array in plain.items()}
        plain_call = dataclasses.replace(call, **specs, beta=None, seg_ids=None, use_qk_l2norm=False, softmax_scale=1.0)
        others = {"initial_state": inputs.initial_state, "cu_seqlens": inputs.cu_seqlens}
        super().__init__(plain_call, DeltaRuleInputs(**plain, **others), chunk)
        self.width, self.channels = call.query.shape[3], call.value.shape[3]
        self.squares = self.batch, self.chunks, call.heads
        self.numbers = self.length, self.chunks, self.call.sequences
        self.table = self.bounds, self.first, self.sequence
        self.launch: dict[str, Any] = {"R": self.rule, "CHUNK": chunk, "WHOLE": self.whole}
        self.levels = chunk.bit_length() - 1

    @property
    def key_tile(self) -> tuple[tuple[int, ...], Any]:
        return (*self.tokens, self.width), self.dtype

    @property
    def value_tile(self) -> tuple[tuple[int, ...], Any]:
        return (*self.tokens, self.channels), self.dtype

    def prepare(self, *, keep: bool) -> _Prepared:
        x = self.inputs
        most = 64 if self.rule.bfloat16 else 16
        square = (*self.squares, self.chunk, self.chunk) if keep else (1,), self.dtype
        key, value, totals = self.key_tile, self.value_tile, ((*self.squares, self.width), jnp.float32)
        made = call_kernel(
            general_prepare_kernel,
            (x.query, x.key, x.value, x.decay, x.a, x.b, *self.table, *self.numbers),
            (key, key, key, key, totals, value, value, square, square, square, square),
            grid=self.batch * self.chunks * self.call.heads,
            num_warps=4,
            BLOCK_K=min(dot_block(self.width), most),
            BLOCK_V=min(dot_block(self.channels), 64 if self.rule.bfloat16 else 32),
            LEVELS=self.levels,
            KEEP=keep,
            **self.launch,
        )
        return _Prepared(*made)

    def scan(self, made: _Prepared, config: Config | GradientConfig, *, out: bool, keep: bool, final: bool) -> list[Any]:
        """Outputs, what tokens read through b `[b, t, H, v]`, states before chunks and after sequences."""
        states = (*self.squares, self.width, self.channels)
        return call_kernel(
            general_scan_kernel,
            (*made[:7], self.inputs.value, *self.or_query(self.inputs.initial_state), self.bounds, self.first, *self.numbers),
            (
                ((*self.tokens, self.channels) if out else (1,), self.dtype),
                ((*self.tokens, self.channels) if keep else (1,), self.dtype),
                (states if keep else (1,), self.dtype),
                (self.final_shape if final else (1,), jnp.float32),
            ),
            INITIAL=self.inputs.initial_state is not None,
            OUT=out,
            KEEP=keep,
            FINAL=final,
            **self.scan_launch(config),
        )

    def scan_backward(self, made: _Prepared, config: GradientConfig, d_out: Any, d_final: Any) -> list[Any]:
        """The gradients of states after chunks and before sequences."""
        launch = self.scan_launch(config)
        launch["grid"] = launch["grid"] // self.sequences * self.call.sequences
        return call_kernel(
            general_scan_backward_kernel,
            (
                *(made.read, made.read_query, made.write_a, made.totals, d_out, *self.or_query(d_final)),
                *(self.bounds, self.first, *self.numbers),
            ),
            (((*self.squares, self.width, self.channels), self.dtype), (self.final_shape, jnp.float32)),
            FINAL=d_final is not None,
            **launch,
        )

    def value_gradients(self, made: _Prepared, config: GradientConfig, d_out: Any, d_states: Any) -> list[Any]:
        """Of values, and of what b reads before the inverse `[b, t, H, v]`."""
        block = min(config.gradient_block_v, dot_block(self.channels))
        return call_kernel(
            general_value_kernel,
            (made.write_key, made.write_a, d_out, d_states, *made[7:], *self.table, *self.numbers),
            (self.value_tile, self.value_tile),
            grid=self.batch * self.chunks * self.call.heads * -(-self.channels // block),
            num_warps=4,
            BLOCK_K=dot_block(self.width),
            BLOCK_V=block,
            **self.launch,
        )

    def gradients(self, config: GradientConfig, arrays: tuple[Any, ...]) -> list[Any]:
        """Of query, key, a, b and decay `[b, t, H, d]`.

        arrays: the gradients of outputs and of what b reads; what it reads; states before chunks, and the gradients of those after.
        """
        x, block = self.inputs, min(config.gradient_block_k, dot_block(self.width))
        return call_kernel(
            general_gradient_kernel,
            (x.query, x.key, x.value, x.decay, x.a, x.b, *arrays, *self.table, *self.numbers),
            (*[self.key_tile] * 4, (self.key_tile[0], jnp.float32)),
            grid=self.batch * self.chunks * self.call.heads * -(-self.width // block),
            num_warps=config.gradient_num_warps,
            BLOCK_K=block,
            BLOCK_V=min(config.gradient_block_v, dot_block(self.channels)),
            LEVELS=self.levels,
            **self.launch,
        )


def forward(call: DeltaRuleCall, inputs: DeltaRuleInputs, config: Config) -> DeltaRuleOutputs:
    plain = _plain(call, _marks(call, inputs), _tokens(inputs))
    problem = _General(call, inputs, plain, config.chunk_size)
    out, _, _, final = problem.scan(problem.prepare(keep=False), config, out=True, keep=False, final=call.return_state)
    return DeltaRuleOutputs(out.astype(call.value.dtype), final if call.return_state else None)


def backward(
    call: DeltaRuleCall, inputs: DeltaRuleInputs, cotangents: DeltaRuleOutputs, config: GradientConfig
) -> DeltaRuleInputs:
    marks = _marks(call, inputs)
    plain, pull = jax.vjp(lambda arrays: _plain(call, marks, arrays), _tokens(inputs))
    problem = _General(call, inputs, plain, config.chunk_size)
    d_out = cotangents.out if marks[0] is None else where(marks[0], cotangents.out)
    made = problem.prepare(keep=True)
    _, reads, states, _ = problem.scan(made, config, out=False, keep=True, final=False)
    d_states, d_initial = problem.scan_backward(made, config, d_out, cotangents.final_state)
    d_value, d_read = problem.value_gradients(made, config, d_out, d_states)
    d_query, d_key, d_a, d_b, d_decay = problem.gradients(config, (d_out, d_read, reads, states, d_states))
    found = {"query": d_query, "key": d_key, "value": d_value, "decay": d_decay, "a": d_a, "b": d_b}
    (gradients,) = pull({name: array.astype(plain[name].dtype) for name, array in found.items()})
    return DeltaRuleInputs(**gradients, initial_state=None if inputs.initial_state is None else d_initial)
