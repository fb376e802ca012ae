"""From a run of the trainer to a served completion, and the record of the benchmark."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

from ejkernel_serve import bench, models
from ejkernel_serve.__main__ import main
from ejkernel_serve.config import EngineConfig, Sampling
from ejkernel_serve.engine import Engine
from ejkernel_serve.vocabulary import BYTES
from ejkernel_train import __main__ as trainer

SMALL = ["--pages", "32", "--max-length", "64", "--max-requests", "4", "--buckets", "8", "--dtype", "float32"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a few steps of training."""
    folder = tmp_path_factory.mktemp("checkpoint")
    assert trainer.main(["--kernels", "plain", "--steps", "2", "--batch", "1", "--checkpoints", str(folder)]) == 0
    return folder


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_a_trained_model_is_served(checkpoint: Path):
    """By the command, until SIGTERM."""
    port = free_port()
    command = [sys.executable, "-m", "ejkernel_serve", "--checkpoint", str(checkpoint), "--port", str(port), "--name", "mine"]
    with subprocess.Popen([*command, *SMALL]) as server, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        try:
            answer = None
            while answer is None:
                assert server.poll() is None, "the server has ended"
                try:
                    answer = client.get("/health")
                except httpx.ConnectError:
                    time.sleep(0.1)
            body = {"model": "mine", "prompt": "The ", "max_tokens": 20, "temperature": 0}
            text = client.post("/v1/completions", json=body, timeout=30).raise_for_status().json()["choices"][0]["text"]
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) in (0, -signal.SIGTERM)
    config = EngineConfig(pages=32, max_length=64, max_requests=4, buckets=(8,), dtype="float32")
    engine = Engine(models.load_model("llama", "tiny", checkpoint), config)
    request = engine.submit(BYTES.encode("The "), Sampling(max_tokens=20, temperature=0.0))
    engine.finish()
    assert text == BYTES.text(request.generated)


def test_the_weights_are_those_that_were_trained(checkpoint: Path):
    trained, random = (models.load_model("llama", "tiny", folder) for folder in (checkpoint, None))
    assert jax.tree.structure(trained) == jax.tree.structure(random)
    assert not np.allclose(trained.embedding, random.embedding)


def test_a_model_whose_layers_have_parameters_of_their_own_is_served_alike(checkpoint: Path, tmp_path: Path):
    asked = ["--kernels", "plain", "--steps", "2", "--batch", "1", "--layers", "unroll", "--checkpoints", str(tmp_path)]
    assert trainer.main(asked) == 0
    stacked, own = (models.load_model("llama", "tiny", folder) for folder in (checkpoint, tmp_path))
    assert jax.tree.structure(stacked) == jax.tree.structure(own)
    for left, right in zip(jax.tree.leaves(stacked), jax.tree.leaves(own), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-3)  # of two steps in bfloat16, by another program


def test_nothing_is_compiled_after_the_warm_up(checkpoint: Path):
    """With restored weights, which are placed on a device, as with random ones."""
    config = EngineConfig(pages=33, max_length=64, max_requests=4, buckets=(4, 8), dtype="float32")
    for folder in (checkpoint, None):
        engine = Engine(models.load_model("llama", "tiny", folder), config)
        engine.scheduler.ends = frozenset()
        engine.warm_up()
        programs = [program._cache_size() for program in engine.programs]
        requests = [engine.submit(BYTES.encode("a" * size), Sampling(max_tokens=3)) for size in (1, 9, 20)]
        engine.finish()
        assert [len(request.generated) for request in requests] == [3, 3, 3]
        assert [program._cache_size() for program in engine.programs] == programs


def test_checkpoints_that_are_none(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, message in [
        (["--checkpoint", str(tmp_path / "missing")], "is no folder"),
        (["--checkpoint", str(tmp_path)], "has no checkpoint"),
        (["--checkpoint", str(checkpoint), "--model", "moe"], "is not of --model moe --size tiny"),
        (["--random", "tiny", "--pages", "3"], "pages is 3; a request of max_length=1024 needs 64"),
    ]:
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "record.json"
    sizes = ["--requests", "1", "6", "--prompt", "9", "--generate", "5", "--repeats", "1", "--out", str(out)]
    assert bench.main(["--random", "tiny", *SMALL, *sizes]) == 0
    record = json.loads(out.read_text())
    assert record["versions"]["jax"] == jax.__version__ and record["device"] == "cpu"
    assert [row["requests"] for row in record["rows"]] == [1, 6]
    assert [row["generated_tokens"] for row in record["rows"]] == [5, 30]
    for row in record["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["generated_tokens"] / row["seconds"])
        assert 0 < row["token_seconds"]["p50"] <= row["token_seconds"]["p99"] < row["seconds"]
        assert 0 < row["first_token_seconds"]["p50"] < row["seconds"]
    assert record["rows"][0]["steps"] == 3  # two chunks of the prompt, then four tokens at once
    assert "llama-tiny on cpu" in capsys.readouterr().out


def test_the_benchmark_needs_no_server():
    code = "import sys, ejkernel_serve.bench; print({'starlette', 'uvicorn', 'pydantic', 'orbax'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
