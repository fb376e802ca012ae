"""EasyDeL's paged engine, eSurge: greedy tokens of several requests at once against the plain reference."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator
from typing import Any

import families
import jax.numpy as jnp
import numpy as np
import oracle

CACHE_BYTES = 1 << 20
NEW = 6
PROMPTS = (3, 9, 21, 14)
"""Lengths; the longest needs more than one page."""


@contextlib.contextmanager
def tokenizer() -> Generator[Any]:
    """Words `t00 ... t63` as tokens of these numbers, in a directory, since the engine's workers load it from there."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    numbers = {f"t{number:02}": number for number in range(families.VOCABULARY)}
    # the parser that EasyDeL takes for Mistral wants a token of this name
    words = Tokenizer(WordLevel({**numbers, "[TOOL_CALLS]": families.VOCABULARY}, unk_token="t00"))
    words.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t00", pad_token="t00", eos_token="t01", bos_token="t02")
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        yield PreTrainedTokenizerFast.from_pretrained(folder)


@contextlib.contextmanager
def small_cache() -> Generator[None]:
    """Without statistics of a device's memory EasyDeL takes 4 GiB for pages, which a CPU would have to copy at every step."""
    from easydel.caching.ragged_page import cache

    before = cache.per_device_hbm_budget_bytes
    cache.per_device_hbm_budget_bytes = lambda *args, **kwargs: CACHE_BYTES
    try:
        yield
    finally:
        cache.per_device_hbm_budget_bytes = before


def served(name: str, mechanism: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and what the engine appends to each."""
    import easydel as ed
    from easydel.inference.sampling_params import SamplingParams

    model = families.build(name, mechanism)
    random = np.random.default_rng(3)
    prompts = [random.integers(3, families.VOCABULARY, length).tolist() for length in PROMPTS]
    texts = [" ".join(f"t{token:02}" for token in prompt) for prompt in prompts]
    with tokenizer() as words, small_cache(), families.on_mesh(model.config.mesh):
        engine = ed.eSurge(
            model=model,
            processor=words,
            dtype=jnp.float32,
            max_model_len=64,
            max_num_seqs=4,
            page_size=16,
            min_input_pad=4,
            min_token_pad=16,
            max_num_seq_buckets=[4],
            hbm_utilization=0.01,
            max_num_batched_tokens=16,
            sharding_axis_dims=(1, 1, 1, 1, 1),
            silent_mode=True,
        )
        engine.initiate()
        try:
            outputs = engine.generate(texts, SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True), use_tqdm=False)
        finally:
            engine.terminate()
    taken = [np.asarray(output.prompt_token_ids).ravel().tolist() for output in outputs]
    assert taken == prompts, taken
    return prompts, [list(output.outputs[0].token_ids) for output in outputs]


def compare(name: str, mechanism: str) -> dict[str, Any]:
    """Whether every token is the reference's greedy choice after what came before."""
    prompts, new = served(name, mechanism)
    equal, width = 0, families.FAMILIES[name].fields.get("sliding_window")
    # paged functions count the token itself among the window's keys, EasyDeL's other mechanisms do not
    window = {} if width is None else {"sliding_window": width - 1}
    with oracle.in_place():
        model = families.build(name, "vanilla", **window)
        with families.on_mesh(model.config.mesh):
            for prompt, tokens in zip(prompts, new, strict=True):
                ids = jnp.asarray([prompt + tokens])
                logits = np.asarray(model(input_ids=ids, attention_mask=jnp.ones_like(ids)).logits)[0]
                equal += int((logits[len(prompt) - 1 : -1].argmax(-1) == np.asarray(tokens)).sum())
    total = sum(map(len, new))
    return {"ok": equal == total == NEW * len(prompts), "tokens": total, "equal": equal}
