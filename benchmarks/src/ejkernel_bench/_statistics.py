"""Ratios of medians with what is known of them: percentile bootstrap over the recorded samples.

The samples of one process say nothing of how the next process will differ (placement of memory, clocks, neighbours); the
interval holds the noise within a run, and whoever judges by it adds a threshold for the rest.

`scipy.stats.bootstrap` gives the same intervals, which a test holds. It is not called here since importing it takes two seconds,
more than a comparison of two recorded runs does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class LogRatio:
    """The natural logarithm of a ratio of times: from the medians, and from the medians of resamples."""

    point: float
    draws: np.ndarray

    @classmethod
    def of(cls, numerator: Sequence[float], denominator: Sequence[float], seed: str) -> LogRatio:
        """Of two sets of samples; the same for the same seed."""
        point = math.log(np.median(numerator) / np.median(denominator))
        return cls(point, _log_medians(numerator, f"{seed} numerator") - _log_medians(denominator, f"{seed} denominator"))

    @classmethod
    def mean(cls, several: Sequence[LogRatio]) -> LogRatio:
        """The geometric mean of the ratios."""
        return cls(sum(one.point for one in several) / len(several), np.mean([one.draws for one in several], axis=0))

    def __sub__(self, other: LogRatio) -> LogRatio:
        return LogRatio(self.point - other.point, self.draws - other.draws)

    @property
    def ratio(self) -> float:
        """What was measured."""
        return math.exp(self.point)

    def interval(self, confidence: float) -> tuple[float, float]:
        """Between what the ratio lies."""
        low, high = np.exp(np.quantile(self.draws, ((1 - confidence) / 2, (1 + confidence) / 2)))
        return float(low), float(high)


def _log_medians(samples: Sequence[float], seed: str) -> np.ndarray:
    found = np.asarray(samples, dtype=np.float64)
    drawn = np.random.default_rng(zlib.crc32(seed.encode())).integers(found.size, size=(RESAMPLES, found.size))
    return np.log(np.median(found[drawn], axis=1))
