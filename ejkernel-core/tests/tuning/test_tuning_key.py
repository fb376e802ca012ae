"""Keys: what they tell apart, what they do not, and their canonical text."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel
from ejkernel import tuning
from ejkernel.call import ArraySpec, Call
from ejkernel.configs import key as _key

pytestmark = pytest.mark.filterwarnings("error")


def test_canonical_text(world: Any) -> None:
    key = world.key()
    text = json.dumps(key.to_dict(), sort_keys=True, separators=(",", ":"))
    assert key.digest == hashlib.sha256(text.encode()).hexdigest()
    assert key.to_dict() == {
        "operation": "rms_norm",
        "phase": "forward",
        "implementation": "fixture",
        "version": 1,
        "call": {
            "x": {"dtype": "float32", "shape": [3, 4]},
            "scale": None,
            "offset": None,
            "epsilon": 1e-6,
            "scale_offset": 0.0,
        },
        "backend": "cpu",
        "device_kind": jax.devices()[0].device_kind,
        "compute_capability": "",
        "jax": ".".join(jax.__version__.split(".")[:3]),
        "core": ".".join(ejkernel.__version__.split(".")[:2]),
    }
    assert tuning.Key.from_dict(json.loads(json.dumps(key.to_dict()))) == key


def test_every_field_counts(world: Any) -> None:
    key = world.key()
    changed = [
        dataclasses.replace(key, **{field.name: 2 if field.name == "version" else '{"x":1}'})
        for field in dataclasses.fields(key)
    ]
    assert len({key.digest, *(other.digest for other in changed)}) == 11


def test_calls_are_told_apart(world: Any) -> None:
    keys = {world.key(x).digest for x in (world.x, jnp.ones((3, 5)), jnp.ones((3, 4), jnp.bfloat16))}
    assert len(keys) == 3
    assert world.key(jnp.ones((3, 4))) == world.key()


def test_two_requests_under_other_settings_have_one_key(world: Any) -> None:
    world.register(platform="other", priority=1)
    with ejkernel.use(forbid={"other"}), ejkernel.overlay({"rms_norm": {"rows": 1}}):
        inside = world.key()
    assert inside == world.key()


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Inner:
    limit: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RichCall(Call):
    x: ArraySpec
    inner: Any = None


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (Colour.RED, "RED"),
        (Inner(math.inf), {"limit": {"float": "inf"}}),
        ((None, 3), [None, 3]),
        (frozenset({"b", "a"}), ["a", "b"]),
        ((ArraySpec((4,), "int32"),), [{"dtype": "int32", "shape": [4]}]),
    ],
)
def test_encoding(value: Any, encoded: Any) -> None:
    text = _key._call_text(RichCall(x=ArraySpec((2, 3), "float32"), inner=value))
    assert json.loads(text) == {"x": {"dtype": "float32", "shape": [2, 3]}, "inner": encoded}


def test_what_has_no_json_form() -> None:
    with pytest.raises(TypeError, match=r"inner: got .*object.*JSON form in a canonical call"):
        _key._call_text(RichCall(x=ArraySpec((2, 3), "float32"), inner=object()))


def test_bucket_and_distance(world: Any) -> None:
    one, other, far = (world.key(jnp.ones(shape)) for shape in ((63, 15), (35, 11), (63, 30)))
    assert one.bucket == other.bucket == far.bucket != world.key(jnp.ones((63, 15), jnp.bfloat16)).bucket
    assert (one.sizes, other.sizes) == ((63, 15), (35, 11))
    assert one.distance(other) == pytest.approx(math.hypot(math.log2(64 / 36), math.log2(16 / 12)))
    assert one.distance(one) == 0
    assert one.distance(far) == far.distance(one) == math.inf


@pytest.mark.parametrize(("version", "expected"), [("0.12.0.1", "0.12.0"), ("0.11.2", "0.11.2"), ("0.13", "0.13.0")])
def test_version_of_jax_has_three_numbers(monkeypatch: pytest.MonkeyPatch, version: str, expected: str) -> None:
    monkeypatch.setattr(jax, "__version__", version)
    assert _key.running_versions.__wrapped__()[0] == expected


def test_configs_survive_json(world: Any) -> None:
    @dataclasses.dataclass(frozen=True)
    class Nested:
        tile: tuple[int, ...] = (1, 2)
        scale: float = 0.5
        kind: str | None = None

    plain = tuning.to_plain(Nested())
    assert tuning.from_plain(Nested, json.loads(json.dumps(plain))) == Nested()


def test_config_that_json_cannot_hold() -> None:
    @dataclasses.dataclass(frozen=True)
    class Odd:
        kind: Any

    for value in (Colour.RED, math.nan, [1], {"a": 1}, (1, object())):
        with pytest.raises(TypeError, match="kind: got"):
            tuning.to_plain(Odd(value))
