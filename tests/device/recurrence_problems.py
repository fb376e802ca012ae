"""What `recurrence_sweep.py` measures: families of recurrences, shapes, the peer's calls and the textbook's step.

Arrays are named as parameters of the public function. Queries, keys and values are bfloat16, decays and what a model keeps in
float32 are float32.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import ejkernel
from ejkernel.operations import get_operation
from ejkernel_bench.peers import known_peers

BOUND = -0.61
"""RWKV-7's decays are above it, which the peer's faster mode wants to be told."""
STATE_WIDTH = 16
"""Of Mamba-1, per channel."""


class Shape(NamedTuple):
    """width: of keys and values; documents: how many sequences are packed, 0 = rows."""

    batch: int
    length: int
    heads: int
    width: int
    documents: int = 0

    def __str__(self) -> str:
        packed = f" docs{self.documents}" if self.documents else ""
        return f"B{self.batch} T{self.length} H{self.heads} D{self.width}{packed}"


SHAPES = (
    Shape(1, 8192, 32, 128),
    Shape(1, 2048, 32, 128),  # the one whose numbers are checked
    Shape(1, 8192, 32, 64),
    Shape(1, 8192, 32, 128, 8),
    Shape(1, 8192, 8, 128),
    Shape(4, 8192, 32, 128),
    Shape(1, 32768, 32, 128),
    Shape(1, 32768, 8, 128),
    Shape(4, 2048, 32, 64),
    Shape(4, 2048, 32, 128),
)
CHECKED = SHAPES[1]
SMALL = (Shape(1, 64, 2, 64), Shape(1, 48, 2, 64, 3))
STEPS = (Shape(1, 1, 32, 128), Shape(64, 1, 32, 128), Shape(256, 1, 32, 128), Shape(16, 1, 32, 128))
SMALL_STEPS = (Shape(2, 1, 2, 64),)

Arrays = dict[str, Any]
Function = Callable[..., Any]
"""From arrays by name to the result, or to it and the state."""


class Draw:
    """Normal numbers, one key after the other."""

    def __init__(self, shape: Shape) -> None:
        self.keys = iter(jax.random.split(jax.random.key(0), 16))
        self.tokens = shape.batch, shape.length

    def __call__(self, *sizes: int, dtype: Any = jnp.float32) -> Any:
        return jax.random.normal(next(self.keys), sizes, jnp.float32).astype(dtype)

    def heads(self, shape: Shape, names: str) -> Arrays:
        """`[B,T,H,D]` in bfloat16."""
        sizes = *self.tokens, shape.heads, shape.width
        return {name: self(*sizes, dtype=jnp.bfloat16) for name in names.split()}

    def bounds(self, shape: Shape) -> Arrays:
        """Packed sequences of unequal lengths, the last one twice as long as the first."""
        if not shape.documents:
            return {}
        parts = jnp.cumsum(jnp.linspace(1.0, 2.0, shape.documents))
        ends = jnp.round(shape.length * parts / parts[-1]).astype(jnp.int32)
        return {"cu_seqlens": jnp.concatenate([jnp.zeros(1, jnp.int32), ends])}

    def state(self, shape: Shape, *sizes: int, name: str = "initial_state") -> Arrays:
        """For a step only."""
        return {name: self(shape.batch, *sizes)} if shape.length == 1 else {}


@dataclasses.dataclass(frozen=True)
class Family:
    """One recurrence.

    Attributes:
        function: the public one.
        make: its arrays.
        step: the textbook's update of one token, in float32; None where steps are not swept.
        peer: the same with jax-linear-attention; None where it has none.
        options: of the public function.
        swapped: the peer's state has its last two axes the other way round.
        more: shapes besides the common ones.
    """

    function: str
    make: Callable[[Shape], Arrays]
    step: Function | None
    peer: Function | None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    swapped: bool = False
    more: tuple[Shape, ...] = ()

    def ours(self, arrays: Arrays, **options: Any) -> Any:
        found = getattr(ejkernel, self.function)(**arrays, **self.settings(arrays), **options)
        return _with_state(arrays, found)

    def settings(self, arrays: Arrays) -> dict[str, Any]:
        step = _is_step(arrays) and not self.function.startswith("state_space")
        return {**self.options, **({"return_state": True} if step else {})}

    def for_peer(self, arrays: Arrays) -> Arrays:
        if not self.swapped or "initial_state" not in arrays:
            return arrays
        return {**arrays, "initial_state": jnp.swapaxes(arrays["initial_state"], -1, -2) + 0}


def _is_step(arrays: Arrays) -> bool:
    return "initial_state" in arrays or "state" in arrays


def _with_state(arrays: Arrays, found: Any) -> Any:
    """Result and state of a step, else the result alone."""
    if not isinstance(found, tuple):
        return found
    return found[:2] if _is_step(arrays) else found[0]


def _documents(cu_seqlens: Any, length: int) -> dict[str, Any]:
    """What the peer takes instead of bounds."""
    if cu_seqlens is None:
        return {}
    tokens = jnp.arange(length, dtype=jnp.int32)
    return {"segment_ids": jnp.searchsorted(cu_seqlens, tokens, side="right").astype(jnp.int32)[None]}


def by_adapter(operation: str, rename: Mapping[str, str], **options: Any) -> Function:
    """The peer as `ejkernel bench` calls it; rename: from our public names to those of the operation."""

    def peer(arrays: Arrays) -> Any:
        adapter = next(one for one in known_peers() if one.name == "jla")
        owner = get_operation(operation)
        given = {rename.get(name, name): array for name, array in arrays.items()}
        constant = {name: made(arrays) if callable(made) else made for name, made in options.items()}
        stated = {"return_state": True} if _is_step(arrays) else {}
        bound = owner.canonicalise(**given, **constant, **stated)
        function: Any = adapter.build(operation, bound.call, bound.inputs)
        if isinstance(function, str):
            raise NotImplementedError(function)
        found = function(bound.inputs)
        return (found["out"], found["final_state"][:, 0]) if _is_step(arrays) else found["out"]

    return peer


# delta rule


def _delta(shape: Shape, *, channel: bool) -> Arrays:
    draw = Draw(shape)
    made = draw.heads(shape, "query key value")
    per_head = *draw.tokens, shape.heads
    made["beta"] = jax.nn.sigmoid(draw(*per_head)).astype(jnp.bfloat16)
    made["decay"] = -0.1 * jnp.abs(draw(*per_head, *([shape.width] if channel else [])))
    return {**made, **draw.bounds(shape), **draw.state(shape, shape.heads, shape.width, shape.width)}


def _wide(arrays: Arrays, names: str) -> list[Any]:
    """The only token of `[B,1,...]`, in float32."""
    return [arrays[name][:, 0].astype(jnp.float32) for name in names.split()]


def _unit(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6)


def _read(query: Any, state: Any) -> Any:
    return jnp.einsum("bhd,bhdv->bhv", query, state)


def _delta_step(arrays: Arrays) -> Any:
    query, key, value, beta, decay = _wide(arrays, "query key value beta decay")
    query, key = _unit(query), _unit(key)
    decay = decay if decay.ndim == 3 else decay[..., None]
    state = jnp.exp(decay)[..., None] * arrays["initial_state"]
    new = beta[..., None] * (value - _read(key, state))
    state = state + key[..., :, None] * new[..., None, :]
    return (_read(query, state) * query.shape[-1] ** -0.5)[:, None].astype(arrays["value"].dtype), state


def _rwkv7(shape: Shape) -> Arrays:
    draw = Draw(shape)
    made = draw.heads(shape, "r k v")
    sizes = *draw.tokens, shape.heads, shape.width
    made["w"] = -0.6065 * jax.nn.sigmoid(draw(*sizes))
    unit = _unit(draw(*sizes))
    made["a"] = (unit * jax.nn.sigmoid(draw(*sizes[:3], 1))).astype(jnp.bfloat16)
    made["b"] = (-unit).astype(jnp.bfloat16)
    return {**made, **draw.bounds(shape), **draw.state(shape, shape.heads, shape.width, shape.width)}


def _rwkv7_step(arrays: Arrays) -> Any:
    r, w, k, v, a, b = _wide(arrays, "r w k v a b")
    state = arrays["initial_state"]
    read = _read(b, state)
    state = jnp.exp(w)[..., None] * state + a[..., :, None] * read[..., None, :] + k[..., :, None] * v[..., None, :]
    return _read(r, state)[:, None].astype(arrays["v"].dtype), state


def _rwkv7_peer(arrays: Arrays) -> Any:
    """Its a reads and its b writes."""
    from jla.ops import linear_attention

    options = _documents(arrays.get("cu_seqlens"), arrays["r"].shape[1])
    if jax.default_backend() == "gpu" and not _is_step(arrays):
        options["lower_bound"] = BOUND
    if _is_step(arrays):
        options.update(initial_state=arrays["initial_state"], output_final_state=True)
    gates = {"w": arrays["w"], "a": arrays["b"], "b": arrays["a"]}
    found = linear_attention("rwkv7", arrays["r"], arrays["k"], arrays["v"], **gates, scale=1.0, **options)
    return _with_state(arrays, found)


# linear recurrence


def _gla(shape: Shape, *, decays: bool = True) -> Arrays:
    draw = Draw(shape)
    made = draw.heads(shape, "query key value")
    if decays:
        made["g"] = -0.05 * jnp.abs(draw(*draw.tokens, shape.heads, shape.width))
    return {**made, **draw.bounds(shape), **draw.state(shape, shape.heads, shape.width, shape.width)}


LAYER = {"layer_idx": 3, "num_layers": 12}


def _slopes(arrays: Arrays) -> Any:
    heads = arrays["query"].shape[2]
    return -(8 / heads) * (1 - LAYER["layer_idx"] / LAYER["num_layers"]) * jnp.arange(heads)


def _linear_step(arrays: Arrays) -> Any:
    query, key, value = _wide(arrays, "query key value")
    factor = jnp.exp(_wide(arrays, "g")[0]) if "g" in arrays else jnp.exp(_slopes(arrays))[None, :, None]
    state = factor[..., None] * arrays["initial_state"] + key[..., :, None] * value[..., None, :]
    return (_read(query, state) * query.shape[-1] ** -0.5)[:, None].astype(arrays["value"].dtype), state


def _rwkv6(shape: Shape) -> Arrays:
    draw = Draw(shape)
    made = draw.heads(shape, "r k v")
    made["w"] = -0.1 * jnp.abs(draw(*draw.tokens, shape.heads, shape.width))
    made["u"] = draw(shape.heads, shape.width)
    return {**made, **draw.bounds(shape), **draw.state(shape, shape.heads, shape.width, shape.width)}


def _rwkv6_step(arrays: Arrays) -> Any:
    r, k, v, w = _wide(arrays, "r k v w")
    state, written = arrays["initial_state"], k[..., :, None] * v[..., None, :]
    out = _read(r, state + arrays["u"][..., None] * written)
    return out[:, None].astype(arrays["v"].dtype), jnp.exp(w)[..., None] * state + written


# state spaces


def _mamba2(shape: Shape) -> Arrays:
    """Heads of 64 channels, one group, states as wide as the shape says."""
    draw = Draw(shape)
    made = {"x": draw(*draw.tokens, shape.heads, 64, dtype=jnp.bfloat16)}
    made |= {name: draw(*draw.tokens, 1, shape.width, dtype=jnp.bfloat16) for name in ("B", "C")}
    made |= {"A": -jnp.exp(draw(shape.heads)), "D": draw(shape.heads)}
    made["dt"] = 0.1 * jax.nn.softplus(draw(*draw.tokens, shape.heads))
    return {**made, **draw.bounds(shape), **draw.state(shape, shape.heads, 64, shape.width)}


def _mamba2_step(arrays: Arrays) -> Any:
    x, B, C, dt = _wide(arrays, "x B C dt")
    decay = jnp.exp(dt * arrays["A"])[..., None, None]
    state = decay * arrays["initial_state"] + (dt[..., None] * x)[..., None] * B[:, :, None]
    out = jnp.einsum("bhpn,bn->bhp", state, C[:, 0]) + arrays["D"][:, None] * x
    return out.reshape(len(x), 1, -1).astype(arrays["x"].dtype), state


def _mamba2_peer(arrays: Arrays) -> Any:
    from jla.layers.ssm import mamba2_ssd

    options = _documents(arrays.get("cu_seqlens"), arrays["x"].shape[1])
    if _is_step(arrays):
        options.update(initial_state=arrays["initial_state"], output_final_state=True)
    given = (arrays[name] for name in ("x", "dt", "A", "B", "C"))
    out, state = mamba2_ssd(*given, d=arrays["D"], grouped_key_grads=True, **options)
    return _with_state(arrays, (out.reshape(*out.shape[:2], -1), state))


def _mamba1(shape: Shape) -> Arrays:
    """Heads times width channels."""
    draw = Draw(shape)
    channels = shape.heads * shape.width
    made = {"hidden_states": draw(*draw.tokens, channels, dtype=jnp.bfloat16)}
    made |= {name: draw(*draw.tokens, STATE_WIDTH, dtype=jnp.bfloat16) for name in ("B", "C")}
    made["A"] = -jnp.tile(jnp.arange(1, STATE_WIDTH + 1, dtype=jnp.float32), (channels, 1))
    made["D"] = draw(channels)
    made["dt"] = (0.1 * jax.nn.softplus(draw(*draw.tokens, channels))).astype(jnp.bfloat16)
    return {**made, **draw.bounds(shape), **draw.state(shape, channels, STATE_WIDTH)}


def _mamba1_step(arrays: Arrays) -> Any:
    x, B, C, dt = _wide(arrays, "hidden_states B C dt")
    state = jnp.exp(dt[..., None] * arrays["A"]) * arrays["initial_state"] + (dt * x)[..., None] * B[:, None]
    out = jnp.einsum("bin,bn->bi", state, C) + arrays["D"] * x
    return out[:, None].astype(arrays["hidden_states"].dtype), state


def _mamba1_peer(arrays: Arrays) -> Any:
    from jla.ops import linear_attention

    x = arrays["hidden_states"]
    options = _documents(arrays.get("cu_seqlens"), x.shape[1])
    if _is_step(arrays):
        options.update(initial_state=arrays["initial_state"], output_final_state=True)
    gates = {"dt": arrays["dt"], "a": arrays["A"], "d": arrays["D"]}
    found = linear_attention("mamba1", arrays["C"], arrays["B"], x, **gates, scale=1.0, **options)
    return _with_state(arrays, found)


def _mamba3(shape: Shape) -> Arrays:
    """Half as many channels as the state is wide, and a quarter of the state's pairs turn."""
    draw = Draw(shape)
    made = {"x": draw(*draw.tokens, shape.heads, shape.width // 2, dtype=jnp.bfloat16)}
    made |= {name: draw(*draw.tokens, 1, shape.width, dtype=jnp.bfloat16) for name in ("B", "C")}
    made |= {name: draw(*draw.tokens, shape.heads) for name in ("dt", "trap")}
    made |= {"A": -jnp.exp(draw(shape.heads)), "D": draw(shape.heads), "dt_bias": draw(shape.heads) - 2}
    made["angles"] = draw(*draw.tokens, 1, shape.width // 4)
    return {**made, **{name: draw(shape.heads, shape.width) for name in ("B_bias", "C_bias")}, **draw.bounds(shape)}


def _rwkv4(shape: Shape) -> Arrays:
    draw = Draw(shape)
    channels = shape.heads * shape.width
    made = {name: draw(channels) for name in ("w", "u")}
    made |= {name: draw(*draw.tokens, channels, dtype=jnp.bfloat16) for name in ("k", "v")}
    return {**made, **draw.state(shape, 3, channels, name="state")}


def _rwkv4_step(arrays: Arrays) -> Any:
    k, v = _wide(arrays, "k v")
    total, weight, largest = jnp.moveaxis(arrays["state"], 1, 0)
    now = jnp.maximum(largest, arrays["u"] + k)
    old, new = jnp.exp(largest - now), jnp.exp(arrays["u"] + k - now)
    out = (old * total + new * v) / (old * weight + new)
    decayed = largest - jnp.exp(arrays["w"])
    after = jnp.maximum(decayed, k)
    old, new = jnp.exp(decayed - after), jnp.exp(k - after)
    state = jnp.stack([old * total + new * v, old * weight + new, after], axis=1)
    return out[:, None].astype(arrays["v"].dtype), state


_RWKV6 = {"r": "query", "k": "key", "v": "value", "w": "gk", "u": "bonus"}
_DELTA_PEER = by_adapter("delta_rule", {}, use_qk_l2norm=True)
FAMILIES = {
    "gated": Family("gated_delta_rule", lambda shape: _delta(shape, channel=False), _delta_step, _DELTA_PEER),
    "kda": Family("kernel_delta_attention", lambda shape: _delta(shape, channel=True), _delta_step, _DELTA_PEER),
    "rwkv7": Family("rwkv7", _rwkv7, _rwkv7_step, _rwkv7_peer, {"softmax_scale": 1.0}),
    "gla": Family("gla_attention", _gla, _linear_step, by_adapter("linear_recurrence", {"g": "gk"})),
    "lightning": Family(
        "lightning_attention",
        lambda shape: _gla(shape, decays=False),
        _linear_step,
        by_adapter("linear_recurrence", {}, g_gamma=_slopes),
        LAYER,
    ),
    "mamba2": Family("state_space_v2", _mamba2, _mamba2_step, _mamba2_peer, swapped=True, more=(Shape(4, 4096, 80, 128),)),
    "mamba1": Family("state_space_v1", _mamba1, _mamba1_step, _mamba1_peer),
    "mamba3": Family("mamba3", _mamba3, None, None, {"dt_softplus": True}),
    "rwkv6": Family(
        "rwkv6", _rwkv6, _rwkv6_step, by_adapter("linear_recurrence", _RWKV6, softmax_scale=1.0), {"softmax_scale": 1.0}
    ),
    "rwkv4": Family("rwkv4", _rwkv4, _rwkv4_step, None),
}
SWEPT = ("gated", "kda", "rwkv7", "gla", "lightning", "mamba2", "mamba1")
