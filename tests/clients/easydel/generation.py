"""`generate()`: greedy tokens with a cache, against `generate()` of the plain reference."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any
from unittest import mock

import families
import jax.numpy as jnp
import numpy as np
import oracle

PROMPT = 8
NEW = 8
_reference: dict[str, np.ndarray] = {}


def generated(name: str, mechanism: str, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """Prompts with their continuations, and the attention mask of both; the second prompt begins with padding."""
    from transformers import GenerationConfig

    model = families.build(name, mechanism, **fields)
    ids = np.random.default_rng(2).integers(3, families.VOCABULARY, (2, PROMPT))
    mask = np.ones((2, PROMPT), np.int32)
    mask[1, :3] = 0
    never = 10 * families.VOCABULARY
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=never, bos_token_id=1)
    model.generation_config = settings
    with families.on_mesh(model.config.mesh):
        out = model.generate(jnp.asarray(ids), attention_mask=jnp.asarray(mask), generation_config=settings)
    sequences = np.asarray(out.sequences)
    return sequences, np.concatenate([mask, np.ones((2, sequences.shape[1] - PROMPT), np.int32)], 1)


def forward_choices(name: str, sequences: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The reference's greedy choice after every prefix of these sequences, from one pass without a cache."""
    with oracle.in_place():
        model = families.build(name, "vanilla")
        with families.on_mesh(model.config.mesh):
            logits = model(input_ids=jnp.asarray(sequences), attention_mask=jnp.asarray(mask)).logits
    return np.asarray(logits)[:, PROMPT - 1 : -1].argmax(-1)


def reference(name: str) -> np.ndarray:
    """The reference's own `generate()`: what EasyDeL's cache does to a sequence is the same there."""
    if name not in _reference:
        with oracle.in_place():
            _reference[name] = generated(name, "vanilla")[0]
    return _reference[name]


def compare(name: str, mechanism: str, **fields: Any) -> dict[str, Any]:
    """Whether every new token is the reference's; and, as a fact about the client, whether a pass without a cache agrees."""
    sequences, mask = generated(name, mechanism, **fields)
    expected, new = reference(name)[:, PROMPT:], sequences[:, PROMPT:]
    without_cache = forward_choices(name, sequences, mask)
    return {
        "ok": new.shape == (2, NEW) and bool((new == expected).all()),
        "tokens": int(new.size),
        "equal": int((new == expected).sum()),
        "equal_without_cache": int((new == without_cache).sum()),
    }


def compare_whole_cache(name: str, mechanism: str) -> dict[str, Any]:
    """Whether every new token is that of a pass without a cache, where EasyDeL's own cut of the cache is out of the way."""
    with whole_cache():
        sequences, mask = generated(name, mechanism)
    expected, new = forward_choices(name, sequences, mask), sequences[:, PROMPT:]
    equal = int((new == expected).sum())
    return {"ok": new.shape == (2, NEW) and equal == new.size, "tokens": int(new.size), "equal": equal}


@contextlib.contextmanager
def whole_cache() -> Generator[None]:
    """Windowed layers keep all keys and `MaskInfo` alone applies the window; Gemma 2 stores its cache. See `docs/clients.md`."""
    from easydel.caching.transformer.cache import TransformerCacheView
    from easydel.layers.attention._flexible import AttentionModule
    from easydel.modules.gemma2.modeling_gemma2 import Gemma2DecoderLayer

    made, layer = TransformerCacheView.init.__func__, Gemma2DecoderLayer.__call__

    def init(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return made(cls, *args, **{**kwargs, "masking_details": None})

    def window(
        self: Any, *, key: Any, value: Any, mask_info: Any, sliding_window: Any, cache_metadata: Any, **rest: Any
    ) -> Any:
        return key, value, mask_info.apply_sliding_window(sliding_window), cache_metadata

    def storing(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, view = layer(self, *args, **kwargs), kwargs.get("cache_view")
        if view is not None:
            view.key, view.value, view.indexs = output.cache_view.key, output.cache_view.value, output.cache_view.indexs
        return output

    with (
        mock.patch.object(TransformerCacheView, "init", classmethod(init)),
        mock.patch.object(AttentionModule, "_apply_sliding_window", window),
        mock.patch.object(Gemma2DecoderLayer, "__call__", storing),
    ):
        yield
