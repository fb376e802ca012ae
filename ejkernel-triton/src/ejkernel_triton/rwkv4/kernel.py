"""The launches of `rwkv4`.

Time is cut into segments that run beside each other: a first pass finds what each does to a state, then every program forms its own
first state from those of the segments before. Backward, a second pass finds what each segment adds to the gradient of a state.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.call import vary_like
from ejkernel.operations.rwkv4.interface import NOTHING_SEEN, Rwkv4Call, Rwkv4Inputs, Rwkv4Outputs
from ejkernel_triton._jax_triton import call_kernel
from ejkernel_triton.rwkv4.config import Config
from ejkernel_triton.rwkv4.gradients import gradient_kernel, head_kernel
from ejkernel_triton.rwkv4.params import params_of
from ejkernel_triton.rwkv4.scan import scan_kernel, segment_kernel
from ejkernel_triton.rwkv4.tiles import FORGETS


class _Problem:
    """What every launch of a call has in common."""

    def __init__(self, call: Rwkv4Call, inputs: Rwkv4Inputs, config: Config) -> None:
        self.call, self.inputs = call, inputs
        self.batch, self.length, self.channels = call.k.shape
        self.params = params_of(call, config)
        self.segments = -(-self.length // self.params.segment_size)
        self.state_shape = self.batch, 3, self.channels
        self.launch: dict[str, Any] = {
            "grid": self.batch * self.segments * -(-self.channels // config.block_i),
            "num_warps": config.num_warps,
            "P": self.params,
        }

    def or_k(self, array: Any) -> Any:
        """An array that is absent is replaced by one that is there."""
        return self.inputs.k if array is None else array

    def ends(self) -> Any:
        """See `segment_kernel`; nothing needs them with one segment."""
        w, _, k, v, _ = self.inputs
        if self.segments == 1:
            return k
        shape = self.batch, self.segments, 3, self.channels
        (ends,) = call_kernel(segment_kernel, (w, k, v, self.length, self.segments), ((shape, jnp.float32),), **self.launch)
        return ends


def forward(call: Rwkv4Call, inputs: Rwkv4Inputs, config: Config) -> Rwkv4Outputs:
    if not call.k.size:
        out = vary_like(jnp.zeros(call.v.shape, call.v.dtype), inputs)
        return Rwkv4Outputs(out, _initial(call, inputs) if call.return_state else None)
    problem = _Problem(call, inputs, config)
    w, u, k, v, state = inputs
    out, final = call_kernel(
        scan_kernel,
        (w, u, k, v, problem.or_k(state), problem.ends(), problem.length, problem.segments),
        ((v.shape, v.dtype), (problem.state_shape if call.return_state else (1,), jnp.float32)),
        STATE=state is not None,
        FINAL=call.return_state,
        **problem.launch,
    )
    return Rwkv4Outputs(out, final if call.return_state else None)


def _initial(call: Rwkv4Call, inputs: Rwkv4Inputs) -> Any:
    if inputs.state is not None:
        return inputs.state.astype(jnp.float32)
    zeros = jnp.zeros((call.k.shape[0], 1, call.k.shape[2]), jnp.float32)
    return vary_like(jnp.concatenate([zeros, zeros, zeros + NOTHING_SEEN], axis=1), inputs)


def backward(
    call: Rwkv4Call, inputs: Rwkv4Inputs, outputs: Rwkv4Outputs, cotangents: Rwkv4Outputs, config: Config
) -> Rwkv4Inputs:
    d_final = cotangents.final_state
    w, u, k, v, state = inputs
    if not call.k.size:
        zeros = {name: _zeros_like(array, inputs) for name, array in inputs._asdict().items()}
        if state is not None and d_final is not None:
            zeros["state"] = d_final.astype(state.dtype)
        return Rwkv4Inputs(**zeros)
    problem = _Problem(call, inputs, config)
    batch, length, segments, channels = problem.batch, problem.length, problem.segments, problem.channels
    chunks = -(-length // config.chunk_size)
    states, heads, final = call_kernel(
        head_kernel,
        (w, u, k, v, problem.or_k(state), cotangents.out, problem.ends(), length, segments),
        tuple(
            (shape, jnp.float32)
            for shape in ((batch, chunks, 3, channels), (batch, segments, 4, channels), problem.state_shape)
        ),
        STATE=state is not None,
        **problem.launch,
    )
    parts = (batch, segments, channels), jnp.float32
    d_log, d_u, d_k, d_v, d_state = call_kernel(
        gradient_kernel,
        (w, u, k, v, cotangents.out, problem.or_k(d_final), states, heads, final, length, segments),
        (parts, parts, (k.shape, k.dtype), (v.shape, v.dtype), (problem.state_shape, jnp.float32)),
        FINAL=d_final is not None,
        **problem.launch,
    )
    return Rwkv4Inputs(
        w=(_shared(d_log, w) * -jnp.exp(jnp.minimum(w.astype(jnp.float32), FORGETS.value))).astype(w.dtype),
        u=_shared(d_u, u).astype(u.dtype),
        k=d_k,
        v=d_v,
        state=None if state is None else d_state.astype(state.dtype),
    )


def _zeros_like(array: Any, inputs: Rwkv4Inputs) -> Any:
    return None if array is None else vary_like(jnp.zeros_like(array), inputs)


def _shared(gradient: Any, like: Any) -> Any:
    """The gradient of each member's segments `[b, segments, c]`, summed over those that share an array `[1 or b, c]`."""
    return jnp.sum(gradient, axis=(0, 1) if like.shape[0] == 1 else 1).reshape(like.shape)
