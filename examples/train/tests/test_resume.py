"""A run goes on from a checkpoint of other devices, and of layers in another form, as if it had never stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from ejkernel_train import data, report
from ejkernel_train.checkpoint import Checkpoints
from ejkernel_train.config import TrainConfig
from ejkernel_train.model import Model, restacked
from ejkernel_train.resume import resume
from ejkernel_train.step import initialise

TINY = TrainConfig(dtype="float32", kernels="plain", length=32, steps=6)


def losses(config: TrainConfig, folder: Path | None = None) -> list[float]:
    if folder is None:
        return report.run([config], data.load())["builds"][0]["losses"]
    with Checkpoints(folder) as checkpoints:
        return report.run([config], data.load(), checkpoints=checkpoints, save_every=3)["builds"][0]["losses"]


@pytest.mark.parametrize(
    ("model", "first", "then"),
    [
        ("llama", {"mesh": "fsdp=4"}, {}),
        ("llama", {"mesh": "fsdp=4"}, {"mesh": "tensor=2,data=2"}),
        ("llama", {}, {"mesh": "fsdp=2,tensor=2"}),
        ("moe", {"mesh": "expert=4"}, {"mesh": "fsdp=2", "layers": "unroll"}),
        ("llama", {"layers": "unroll", "mesh": "fsdp=2"}, {"layers": "scan"}),
    ],
    ids=str,
)
def test_losses_are_those_of_a_run_that_never_stopped(model: str, first: dict[str, str], then: dict[str, str], tmp_path: Path):
    config = dataclasses.replace(TINY, model=model)
    whole = losses(config)
    with Checkpoints(tmp_path) as checkpoints:
        build = report.Build(dataclasses.replace(config, **first))
        for step in range(3):
            build.advance(data.batch(data.load(), config.seed, step, config.batch, config.length))
        checkpoints.save(3, build.state)
    found = [*build.losses, *losses(dataclasses.replace(config, **then), tmp_path)]
    np.testing.assert_allclose(found, whole, rtol=0, atol=2e-5)


def test_the_form_of_layers_changes_no_number(tmp_path: Path):
    """Neither of parameters nor of moments, and scales of float8 go along."""
    config = TrainConfig(model="hybrid", float8=True)
    state = initialise(config)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    other = dataclasses.replace(config, layers="unroll")
    with Checkpoints(tmp_path) as checkpoints:
        found = resume(other, initialise(other), checkpoints)
    assert jax.tree.structure(found) == jax.tree.structure(initialise(other))
    for model in (found.model, found.moments[1][0].mu):
        assert isinstance(model, Model) and not model.stacked
    for one, right in zip(jax.tree.leaves(restacked(found.model, True)), jax.tree.leaves(state.model), strict=True):
        np.testing.assert_array_equal(one, right)


def test_a_process_with_one_device_goes_on_from_four(tmp_path: Path):
    """Which it does not have."""
    command = [sys.executable, "-m", "ejkernel_train", *["--dtype", "float32", "--kernels", "plain", "--length", "32"]]
    command += ["--checkpoints", str(tmp_path / "run"), "--save-every", "3", "--learning-rate", "1e-3", "--warmup", "3"]
    out = tmp_path / "record.json"
    found: list[float] = []
    for devices, asked in ((4, ["--mesh", "fsdp=4", "--steps", "6"]), (1, ["--steps", "6"])):
        flags = f"--xla_force_host_platform_device_count={devices}"
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        subprocess.run([*command, *asked, "--out", str(out)], env=environment, check=True, timeout=300)
        record = json.loads(out.read_text())
        assert record["devices"] == devices
        if devices == 4:
            found = record["builds"][0]["losses"]
            shutil.rmtree(tmp_path / "run" / "6")
        else:
            assert record["first_step"] == 4
            np.testing.assert_allclose(record["builds"][0]["losses"], found[3:], rtol=0, atol=2e-5)
