"""`generate()`: greedy tokens with a cache, against `generate()` of the plain reference."""

from __future__ import annotations

from typing import Any

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
