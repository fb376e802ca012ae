"""Under JAX's own promotion of dtypes and ranks, as users serve; one tiny model for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from ejkernel_serve.config import EngineConfig
from ejkernel_serve.engine import Engine
from ejkernel_train.config import MODELS
from ejkernel_train.model import Model


@pytest.fixture(autouse=True, scope="session")
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def model(_promotion: None) -> Model:
    return Model(MODELS["llama"]["tiny"], jax.random.key(0))


@pytest.fixture
def engine_of(model: Model) -> Iterator[Callable[..., Engine]]:
    """Makes small engines, which share their programs; none may have lost a page at the end."""
    made: list[Engine] = []

    def make(**sizes: Any) -> Engine:
        defaults: dict[str, Any] = {"pages": 64, "page_size": 4, "max_length": 64, "max_requests": 8, "buckets": (4, 32)}
        made.append(Engine(model, EngineConfig(**{**defaults, "dtype": "float32", **sizes})))
        return made[-1]

    yield make
    for engine in made:
        engine.check()
