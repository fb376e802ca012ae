"""Public models' folders are served as their full attention says, with their own norms, rotation and head."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from recomputed import greedy

from ejkernel_serve import models
from ejkernel_serve.__main__ import main, parser
from ejkernel_serve.config import EngineConfig, Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.vocabulary import BYTES
from ejkernel_train import public
from ejkernel_train.config import MODELS
from ejkernel_train.model import Model

pytest.importorskip("safetensors", reason="runs where safetensors is installed")

SIZES = MODELS["llama"]["tiny"]
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
CASES = {
    "normed": dataclasses.replace(SIZES, qk_norm=True, epsilon=0.01),
    "own head": dataclasses.replace(SIZES, tied=False, public=json.dumps({"rope_parameters": LINEAR})),
    "experts": MODELS["moe"]["tiny"],
}


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_served(name: str, tmp_path: Path):
    made = Model(CASES[name], jax.random.key(3))
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


def test_the_name_is_the_folder_s(tmp_path: Path):
    assert models.name_of(parser().parse_args(["--model-folder", str(tmp_path)])) == tmp_path.name
    assert models.name_of(parser().parse_args(["--random", "tiny", "--model", "moe"])) == "moe-tiny"


def test_folders_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--model-folder", str(tmp_path), "--port", "0"]) == 2
    assert f"--model-folder {tmp_path}: {tmp_path / 'config.json'}: No such file or directory" in capsys.readouterr().err
