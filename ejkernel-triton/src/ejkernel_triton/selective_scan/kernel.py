"""The launches of `selective_scan`.

Time is cut into segments that run beside each other. A first pass finds what each segment does to the state before it; then every
program forms its own first state from those of the segments before, and, backward, its last gradient from those after. The
decay over a segment is `exp(A sum dt)`, so it is kept as one number per channel.

Where sequences end inside of rows, chunks with a boundary take another branch, and a segment looks no further than one.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.selective_scan.interface import (
    OPERATION,
    SelectiveScanCall,
    SelectiveScanInputs,
    SelectiveScanOutputs,
)
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.selective_scan.config import Config
from ejkernel_triton.selective_scan.edges import Edges, edges_of
from ejkernel_triton.selective_scan.gradients import gradient_kernel
from ejkernel_triton.selective_scan.params import held_dtype, params_of
from ejkernel_triton.selective_scan.scan import scan_kernel, segment_kernel


class _Problem:
    """What every launch of a call has in common.

    A, B and C are given to kernels in float32: every warp reads them, and Triton lays states out as A lies in memory.
    """

    def __init__(self, call: SelectiveScanCall, inputs: SelectiveScanInputs, config: Config) -> None:
        self.call = call
        wide = {name: getattr(inputs, name).astype(jnp.float32) for name in ("A", "B", "C")}
        self.inputs = inputs._replace(**wide)
        self.batch, self.length, self.channels = call.x.shape
        self.width = call.A.shape[2]
        self.params = params_of(call, config)
        self.segments = -(-self.length // self.params.segment_size)
        self.blocks = -(-self.channels // config.block_i)
        self.edges = edges_of(call, inputs, self.params) if self.params.cut else Edges(None, None, None)
        self.launch: dict[str, Any] = {
            "grid": self.batch * self.segments * self.blocks,
            "num_warps": config.num_warps,
            "P": self.params,
        }

    @property
    def state(self) -> tuple[int, int]:
        return self.channels, self.width

    def or_x(self, *arrays: Any) -> tuple[Any, ...]:
        """Arrays that are absent are replaced by one that is there."""
        return tuple(self.inputs.x if array is None else array for array in arrays)

    def of_all(self, states: Any, otherwise: Any) -> Any:
        """States like initial_state, with `otherwise`, None = 0, for packed sequences without tokens."""
        if self.edges.empty is None:
            return states
        other = jnp.zeros_like(states) if otherwise is None else otherwise.astype(states.dtype)
        return jnp.where(self.edges.empty[:, :, None, None], other, states)

    def segment_pass(self, d_out: Any = None, d_final: Any = None) -> list[Any]:
        """See `segment_kernel`."""
        x, A, B, C, _, dt, initial = self.inputs[:7]
        backward, params = d_out is not None, self.params
        parts = self.batch, self.segments
        for_gradients: tuple[Any, ...] = (
            ((*parts, *self.state), jnp.float32),
            ((self.batch, -(-self.length // params.chunk_size), self.channels), jnp.float32),
            (x.shape, x.dtype),
            (dt.shape, dt.dtype),
            ((params.rest, *x.shape) if params.rest else (1,), held_dtype(self.call)),
            ((*parts, *self.state), jnp.float32),
        )
        return call_kernel(
            segment_kernel,
            (x, A, B, C, dt, *self.or_x(d_out, initial, d_final, self.edges.marks), self.length, self.segments),
            (
                ((*parts, *self.state), jnp.float32),
                ((*parts, self.channels), jnp.float32),
                *(array if backward else ((1,), array[1]) for array in for_gradients),
            ),
            INITIAL=initial is not None,
            BACKWARD=backward,
            **self.launch,
        )


def forward(call: SelectiveScanCall, inputs: SelectiveScanInputs, config: Config) -> SelectiveScanOutputs:
    if _is_empty(call):
        return SelectiveScanOutputs(vary_like(jnp.zeros(call.x.shape, call.x.dtype), inputs), _initial(call, inputs))
    problem = _Problem(call, inputs, config)
    ends, totals = problem.segment_pass()[:2] if problem.segments > 1 else problem.or_x(None, None)
    x, A, B, C, D, dt, initial = problem.inputs[:7]
    out, final = call_kernel(
        scan_kernel,
        (
            *(x, A, B, C, *problem.or_x(D), dt, *problem.or_x(initial), ends, totals),
            *(*problem.or_x(problem.edges.marks, problem.edges.reach), problem.length, problem.segments),
        ),
        ((x.shape, x.dtype), (call.state_shape, jnp.float32)),
        INITIAL=initial is not None,
        **problem.launch,
    )
    return SelectiveScanOutputs(out, problem.of_all(final, initial))


def _is_empty(call: SelectiveScanCall) -> bool:
    """Whether no token or no sequence takes part."""
    return not call.x.size or 0 in call.state_shape


def _initial(call: SelectiveScanCall, inputs: SelectiveScanInputs) -> Any:
    if inputs.initial_state is not None:
        return inputs.initial_state.astype(jnp.float32)
    return vary_like(jnp.zeros(call.state_shape, jnp.float32), inputs)


def backward(
    call: SelectiveScanCall,
    inputs: SelectiveScanInputs,
    outputs: SelectiveScanOutputs,
    cotangents: SelectiveScanOutputs,
    config: Config,
) -> SelectiveScanInputs:
    d_final = cotangents.final_state
    if _is_empty(call):
        zeros = {name: _zeros_like(getattr(inputs, name), inputs) for name in OPERATION.differentiable}
        if inputs.initial_state is not None:
            zeros["initial_state"] = d_final.astype(inputs.initial_state.dtype)
        return SelectiveScanInputs(**zeros)
    problem = _Problem(call, inputs, config)
    ends, totals, heads, sums, held_x, held_dt, rest, held_A = problem.segment_pass(cotangents.out, d_final)
    x, A, B, C, D, dt, initial = problem.inputs[:7]
    batch, length = problem.batch, problem.length
    part = (problem.blocks, batch, length, problem.width), held_dtype(call)
    arrays = (
        *(x, A, B, C, *problem.or_x(D), dt, *problem.or_x(initial), cotangents.out, d_final),
        *(ends, totals, heads, sums, rest, *problem.or_x(problem.edges.marks, problem.edges.reach)),
    )
    d_x, d_A, d_B, d_C, d_D, d_dt, d_initial = call_kernel(
        gradient_kernel,
        (*arrays, held_x, held_dt, held_A, length, problem.segments),
        (
            (x.shape, x.dtype),
            (held_A.shape, jnp.float32),
            part,
            part,
            ((batch, problem.segments, problem.channels) if D is not None else (1,), jnp.float32),
            (dt.shape, dt.dtype),
            (call.state_shape, jnp.float32),
        ),
        input_output_aliases={len(arrays): 0, len(arrays) + 1: 5, len(arrays) + 2: 1},
        INITIAL=initial is not None,
        **problem.launch,
    )
    return SelectiveScanInputs(
        x=d_x,
        A=_shared(d_A, inputs.A),
        B=jnp.sum(d_B, axis=0, dtype=jnp.float32).astype(inputs.B.dtype),
        C=jnp.sum(d_C, axis=0, dtype=jnp.float32).astype(inputs.C.dtype),
        D=None if D is None else _shared(d_D, D),
        dt=d_dt,
        initial_state=None if initial is None else problem.of_all(d_initial, d_final).astype(initial.dtype),
    )


def _zeros_like(array: Any, inputs: SelectiveScanInputs) -> Any:
    return None if array is None else vary_like(jnp.zeros_like(array), inputs)


def _shared(gradient: Any, like: Any) -> Any:
    """The gradient of each member's segments `[b, segments, ...]`, summed over those that share an array `[1 or b, ...]`."""
    axes = (0, 1) if like.shape[0] == 1 else (1,)
    return jnp.sum(gradient, axis=axes).reshape(like.shape).astype(like.dtype)
