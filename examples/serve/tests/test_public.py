"""Public models' folders are served as their full attention says, with their own norms, rotation and head."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from recomputed import greedy, prompts

from ejkernel_serve import models, speculative
from ejkernel_serve.__main__ import main, parser
from ejkernel_serve.config import EngineConfig, Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.vocabulary import BYTES
from ejkernel_train import public
from ejkernel_train.config import MODELS, ModelConfig
from ejkernel_train.model import Model

pytest.importorskip("safetensors", reason="runs where safetensors is installed")

SIZES = MODELS["llama"]["tiny"]
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
GPT_OSS = dataclasses.replace(
    MODELS["moe"]["tiny"],
    pattern=("window_attention", "attention"),
    window=6,
    attention_bias=True,
    sinks=True,
    expert_bias=True,
    swiglu_limit=7.0,
    swiglu_alpha=1.702,
)
MIXTURE = {"experts": 4, "experts_per_token": 2, "shared_hidden": 48}
QUARTER = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
HYBRID = dataclasses.replace(MODELS["hybrid"]["tiny"], **MIXTURE, public=json.dumps({"rope_parameters": QUARTER}))
CASES = {
    "gpt_oss": GPT_OSS,
    "qwen3_next": HYBRID,
    "hybrid": MODELS["hybrid"]["tiny"],
    "normed": dataclasses.replace(SIZES, qk_norm=True, epsilon=0.01),
    "own head": dataclasses.replace(SIZES, tied=False, public=json.dumps({"rope_parameters": LINEAR})),
    "experts": MODELS["moe"]["tiny"],
}


def made_of(config: ModelConfig, seed: int = 3) -> Model:
    """Random, biases and sinks too, which training begins with at 0."""
    random = np.random.default_rng(seed)

    def changed(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        return leaf + random.normal(size=leaf.shape).astype(np.float32) if name.endswith(("bias", "sinks")) else leaf

    return jax.tree_util.tree_map_with_path(changed, Model(config, jax.random.key(seed)))


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_served(name: str, tmp_path: Path):
    made = made_of(CASES[name])
    public.save(made, tmp_path, "float32")
    model, vocabulary = models.load_folder(tmp_path, "float32")
    assert vocabulary is BYTES
    for left, right in zip(jax.tree.leaves(model), jax.tree.leaves(made), strict=True):
        np.testing.assert_array_equal(left, right)
    engine = Engine(model, EngineConfig(pages=32, max_length=64, max_requests=4, buckets=(8,), dtype="float32"))
    prompt = list(BYTES.encode("It is a truth"))
    request = engine.submit(prompt, Sampling(max_tokens=12, temperature=0.0))
    engine.finish()
    assert list(request.generated) == greedy(made, prompt)


SMALL: dict[str, Any] = {"page_size": 4, "max_length": 64, "max_requests": 4, "dtype": "float32"}


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_mixed_batches(name: str):
    """Prompts in chunks beside requests that decode, several at once, as many as lose their pages, and cancelled ones."""
    model = made_of(CASES[name])
    engine = Engine(model, EngineConfig(**SMALL, pages=24, buckets=(4, 16)))
    pages = engine._pages
    if pages.states is not None and pages.inputs is not None:  # what a slot held before is not seen
        engine._pages = pages._replace(states=pages.states * np.nan, inputs=pages.inputs * np.nan)
    requests = []
    for number, prompt in enumerate(prompts(9)):
        requests.append(engine.submit(prompt, Sampling(max_tokens=12, temperature=0.0)))
        engine.step()
        if number % 3 == 2:
            engine.cancel(requests[-2])
        engine.check()
    engine.finish()
    assert sum(request.preemptions for request in requests) > 0
    for request, prompt in zip(requests, prompts(9), strict=True):
        expected = greedy(model, prompt)
        assert request.generated == expected[: len(request.generated)]
        assert request.reason == "cancelled" or len(request.generated) == len(expected)
    assert engine.scheduler.cache.held == 0
    assert not requests[-1].reused or name == "gpt_oss"


def test_drafts_and_windows():
    """They do not branch: a branch would see other tokens than those before it in its text."""
    model, prompt = made_of(GPT_OSS), [1, 2, 3, 4, 9, 8, 2, 3, 4, 2, 3, 4]
    assert [draft.parent for draft in speculative.propose(prompt, 6)] == [-1, 0, 1, -1, 3, 4]
    assert [draft.parent for draft in speculative.propose_chain(prompt, 6)] == [-1, 0, 1]
    for drafts in (0, 6):
        engine = Engine(model, EngineConfig(**SMALL, pages=64, buckets=(4, 32), drafts=drafts))
        request = engine.submit(prompt, Sampling(max_tokens=30, temperature=0.0))
        engine.finish()
        assert request.generated == greedy(model, prompt, 30)
    assert request.drafted > 0


def test_states_have_no_drafts():
    with pytest.raises(ValueError, match="drafts is 4; a model with states that cannot go back has 0"):
        Engine(made_of(HYBRID), EngineConfig(**SMALL, pages=64, buckets=(4,), drafts=4))


def test_the_name_is_the_folder_s(tmp_path: Path):
    assert models.name_of(parser().parse_args(["--model-folder", str(tmp_path)])) == tmp_path.name
    assert models.name_of(parser().parse_args(["--random", "tiny", "--model", "moe"])) == "moe-tiny"


def test_folders_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--model-folder", str(tmp_path), "--port", "0"]) == 2
    assert f"--model-folder {tmp_path}: {tmp_path / 'config.json'}: No such file or directory" in capsys.readouterr().err
