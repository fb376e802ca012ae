"""Combinations of versions that were measured: which work, which are broken and what to install instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from packaging.specifiers import SpecifierSet


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


COMBINATIONS = (
    Combination(
        {"jax-triton": "==0.4.1", "jax": "==0.12.0.1"},
        "bad",
        "jax-triton fails inside a private dead-code-elimination rule of JAX as soon as a Triton kernel is traced",
        'pip install "jax-triton==0.3.1"',
    ),
    Combination(
        {"jax-triton": "==0.3.1", "jax": "==0.11.2", "triton": "==3.6.*"},
        "good",
        "Triton kernels run on Hopper GPUs",
    ),
)


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
