"""Latent attention: both forms against attention written out in float64, with every gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel
from ejkernel import MaskInfo
from ejkernel.modules import FlashMLA, flash_mla, multi_head_latent_attention
from ejkernel.utils.tolerance import FORWARD, GRADIENT, check_close

B, T, S, H, K, R, NOPE, ROPE, V = 2, 7, 9, 4, 2, 6, 5, 4, 3


def problem(rotary: str, dtype: str = "float32", length: int = S, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    shapes = {"query": (B, T, H, NOPE), "key_value": (B, length, R), "w_kc": (R, K, NOPE), "w_vc": (R, K, V)}
    if rotary != "none":
        shapes["b_k"] = (B, length, ROPE)
        if rotary == "joined":
            shapes["query"] = (B, T, H, NOPE + ROPE)
        else:
            shapes["b_q"] = (B, T, H, ROPE) if rotary == "heads" else (B, T, ROPE)
    return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


def written_out(query, key_value, w_kc, w_vc, b_q=None, b_k=None, mask=None, softmax_scale=None):
    """The equation, head by head, in float64."""
    scale = softmax_scale or (NOPE + (0 if b_k is None else ROPE)) ** -0.5
    heads = []
    for h in range(H):
        key, value = key_value @ w_kc[:, h // (H // K)], key_value @ w_vc[:, h // (H // K)]
        logits = query[:, :, h, :NOPE] @ jnp.swapaxes(key, 1, 2)
        if b_k is not None:
            rotary = query[:, :, h, NOPE:] if b_q is None else b_q if b_q.ndim == 3 else b_q[:, :, h]
            logits += rotary @ jnp.swapaxes(b_k, 1, 2)
        logits = logits * scale if mask is None else jnp.where(mask, logits * scale, -jnp.inf)
        heads.append(jax.nn.softmax(logits, axis=-1) @ value)
    return jnp.stack(heads, axis=2)


def pulled(function, arrays):
    @jax.jit
    def run(arrays):
        out, pull = jax.vjp(function, arrays)
        return out, pull(jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype))[0]

    return run(arrays)


@pytest.mark.parametrize("absorbed", [False, True])
@pytest.mark.parametrize("rotary", ["none", "joined", "heads", "shared"])
def test_both_forms_are_the_equation(rotary, absorbed):
    arrays, mask = problem(rotary), np.arange(S) <= np.arange(T)[:, None]
    out, gradients = pulled(lambda arrays: flash_mla(**arrays, causal=True, absorbed=absorbed, platform="xla"), arrays)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(array), jnp.float64) for name, array in arrays.items()}
        wanted, wanted_gradients = pulled(lambda arrays: written_out(**arrays, mask=mask), wide)
        wanted, wanted_gradients = jax.device_get((wanted, wanted_gradients))
    check_close("output", out, wanted, FORWARD["float32"])
    assert gradients.keys() == arrays.keys()
    for name, gradient in gradients.items():
        check_close(f"gradient of {name}", gradient, wanted_gradients[name], GRADIENT["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(dtype):
    arrays = problem("heads", dtype)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(array, np.float64)) for name, array in arrays.items()}
        wanted = jax.device_get(written_out(**wide))
    for absorbed in (False, True):
        out = flash_mla(**arrays, absorbed=absorbed, platform="xla")
        assert out.dtype == dtype
        assert (
            np.abs(np.asarray(out, np.float64) - wanted).max() < (0.05 if dtype == "bfloat16" else 0.006) * np.abs(wanted).max()
        )


def test_masks_and_packed_sequences_agree():
    """Two packed sequences equal two calls; a MaskInfo of the same segments equals the packed call."""
    rng = np.random.default_rng(1)
    arrays = {name: array[:1] if name[0] != "w" else array for name, array in problem("joined", length=T).items()}
    arrays["query"] = jnp.asarray(rng.standard_normal((1, T, H, NOPE + ROPE)), jnp.float32)
    ends = np.array([0, 3, T], np.int32)
    out = flash_mla(**arrays, cu_seqlens=ends, causal=True)
    for first, last in ((0, 3), (3, T)):
        alone = {name: array if name[0] == "w" else array[:, first:last] for name, array in arrays.items()}
        wanted = flash_mla(**alone, causal=True)
        check_close("packed", out[:, first:last], np.asarray(wanted, np.float64), FORWARD["float32"])
    info = MaskInfo.from_segments(np.array([[0] * 3 + [1] * (T - 3)], np.int32))
    for absorbed in (False, True):
        other = flash_mla(**arrays, mask_info=info, causal=True, absorbed=absorbed)
        check_close("segments", other, np.asarray(out, np.float64), FORWARD["float32"])


def test_options_reach_attention():
    arrays = problem("joined")
    plain = flash_mla(**arrays)
    for options in (
        {"softmax_scale": 1.0},
        {"logits_soft_cap": 0.5},
        {"sliding_window": 1},
        {"chunk_size": 2},
        {"softmax_aux": jnp.ones(H)},
        {"bias": jnp.linspace(0, 3, S)[None]},
        {"dropout_prob": 0.5, "dropout_seed": 3},
    ):
        one, other = (flash_mla(**arrays, **options, absorbed=absorbed) for absorbed in (False, True))
        assert np.abs(one - plain).max() > 1e-3, options
        assert np.abs(one - other).max() < 1e-5, options


def test_names():
    arrays = problem("joined")
    with pytest.warns(DeprecationWarning, match="flash_mla: pass b_k= by name"):
        positional = flash_mla(*(arrays.get(name) for name in ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k")))
    assert (positional == flash_mla(**arrays)).all() and positional.shape == (B, T, H, V)
    assert (FlashMLA()(**arrays) == multi_head_latent_attention(**arrays)).all()
    specs = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    assert ejkernel.explain("flash_mla", **specs, causal=True).forward.chosen.id == "xla"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_kc": jnp.ones((R + 1, K, NOPE))}, r"w_kc: got shape \(7, 2, 5\), expected \[r, K, d_nope\] with r = 6"),
        ({"w_vc": jnp.ones((R, 1, V))}, r"w_vc: got shape \(6, 1, 3\), expected \[6, 2, V\] as w_kc"),
        ({"b_k": None}, r"query: got shape .*\[B, T, H, d_nope\]"),
        ({"b_q": jnp.ones((B, T, ROPE))}, r"query: got shape .*\[B, T, H, d_nope\] with b_q"),
        ({"b_k": None, "b_q": jnp.ones((B, T, ROPE))}, "b_q: got an array, expected None without b_k"),
        ({"key_value": jnp.ones((1, S, R))}, "key_value: got batch size 1, expected the query's 2"),
        ({"b_k": jnp.ones((B, S + 1, ROPE))}, r"b_k: got shape .*\[B, S, d_rope\]"),
        ({"w_vc": None}, "w_vc: got NoneType, expected an array"),
        ({"query": None, "cu_seqlens": jnp.array([0, 2])}, "query: got NoneType, expected an array"),
        ({"query": jnp.ones((B, T, H, NOPE)), "b_q": jnp.ones((B, T, ROPE), int)}, "b_q: got dtype int32, expected a floating"),
    ],
)
def test_errors(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        flash_mla(**{**problem("joined"), **change})
