"""`generate()`: greedy tokens with a cache, against a forward pass of the plain reference over the finished sequence."""

from __future__ import annotations

from typing import Any

import families
import jax.numpy as jnp
import numpy as np
import oracle

PROMPT = 8
NEW = 8


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


def expected(name: str, sequences: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, float]:
    """The reference's greedy choice after every prefix of these sequences, and its smallest lead over the second choice."""
    with oracle.in_place():
        model = families.build(name, "vanilla")
        with families.on_mesh(model.config.mesh):
            logits = np.asarray(model(input_ids=jnp.asarray(sequences), attention_mask=jnp.asarray(mask)).logits)
    new = logits[:, PROMPT - 1 : -1]
    second, first = np.sort(new, -1)[..., -2:].transpose(2, 0, 1)
    return new.argmax(-1), float((first - second).min())


def compare(name: str, mechanism: str, **fields: Any) -> dict[str, Any]:
    """Whether every new token is the reference's."""
    sequences, mask = generated(name, mechanism, **fields)
    tokens, lead = expected(name, sequences, mask)
    new = sequences[:, PROMPT:]
    return {
        "ok": new.shape == (2, NEW) and bool((new == tokens).all()),
        "tokens": int(new.size),
        "equal": int((new == tokens).sum()),
        "smallest_lead": lead,
    }
