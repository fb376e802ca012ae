"""Combinations of versions that were measured: which work, which are broken and what to install instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version


@dataclasses.dataclass(frozen=True)
class Combination:
    """Versions that were run together, and what came of it.

    Attributes:
        packages: distribution name to version specifier; it applies when every one is installed and matches.
        verdict: `"good"` or `"bad"`.
        finding: what was seen.
        remedy: what to do about it; empty for a good one.
    """

    packages: Mapping[str, str]
    verdict: Literal["good", "bad"]
    finding: str
    remedy: str = ""


TESTED_JAX = ("0.10.2", "0.12.0.1")
"""The oldest and the newest jax on which all tests run."""

_FIRST_OF_NEXT = ">=0.4.0,<=0.4.1"
_REMEDY = 'pip install "jax-triton==0.3.1"'

COMBINATIONS = (
    Combination(
        {"jax-triton": _FIRST_OF_NEXT, "jax": ">=0.12"},
        "bad",
        "jax-triton fails inside a private dead-code-elimination rule of JAX as soon as a program with a Triton kernel is lowered",
        _REMEDY,
    ),
    Combination(
        {"jax-triton": _FIRST_OF_NEXT, "triton": "<3.7"},
        "bad",
        "jax-triton uses parts of Triton that came with 3.7 and fails as soon as a program with a Triton kernel is lowered",
        _REMEDY,
    ),
    Combination(
        {"jax-triton": "==0.3.1", "jax": ">=0.10.2,<=0.12.0.1", "triton": ">=3.6,<=3.9.0"},
        "good",
        "Triton kernels are lowered for GPUs",
    ),
    Combination(
        {"jax-triton": _FIRST_OF_NEXT, "jax": ">=0.10.2,<0.12", "triton": ">=3.7,<=3.9.0"},
        "good",
        "Triton kernels of one's own are lowered for GPUs; those of ejkernel-triton are called as jax-triton 0.3 wants it",
    ),
    Combination(
        {"jax-triton": "==0.3.1", "jax": "==0.11.2", "triton": "==3.6.*"},
        "good",
        "Triton kernels run on Hopper GPUs",
    ),
)
"""Lowered with jax 0.10.2, 0.11.0, 0.11.2, 0.12.0, 0.12.0.1; jax-triton 0.3.1, 0.4.0, 0.4.1; Triton 3.6.0, 3.7.0, 3.7.1, 3.8.0,
3.9.0. The ranges above span what was found between them."""


def untested_jax(installed: str) -> str:
    """What to know of a jax that is outside of what was tested; empty for one that is inside."""
    oldest, newest = TESTED_JAX
    if Version(oldest) <= Version(installed) <= Version(newest):
        return ""
    word = "newer" if Version(installed) > Version(newest) else "older"
    return f"jax {installed} is {word} than what ejkernel is tested with, {oldest} to {newest}"


def matching(installed: Mapping[str, str]) -> tuple[Combination, ...]:
    """The combinations that these installed versions (by normalised distribution name) amount to."""
    return tuple(
        combination
        for combination in COMBINATIONS
        if all(
            name in installed and SpecifierSet(wanted, prereleases=True).contains(installed[name])
            for name, wanted in combination.packages.items()
        )
    )
