"""Configs of attention over latents, and how the keys of a tile are split. Does not import Triton."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ejkernel.plugin import Target
from ejkernel_triton._blocks import MIN_DOT_SIZE, dot_block, next_power_of_2
from ejkernel_triton._capability import multiprocessors, shared_memory_limit

MAX_LATENT = 512
"""Largest latent: a program holds a tile's accumulator in registers."""
MAX_REST = 128
"""Most channels beside the latent."""
MAX_ROWS = 64
"""Rows whose accumulators of `MAX_LATENT` channels eight warps hold in registers."""
MAX_SPLITS = 64
DEFAULT_MULTIPROCESSORS = 132
_WGMMA = (9, 0)
_WGMMA_ROWS = 64
"""Least long side of an MMA instruction of Hopper; smaller products use those of Ampere."""
_MOST_WARPS = 8
"""Warps whose registers a multiprocessor holds, where each thread uses all that it may."""
_SPARE = 10 * 1024
"""Bytes of shared memory for weights, reductions and changes of layout."""


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig:
    """How queries and keys are tiled.

    Attributes:
        block_q: new tokens of one request that a program serves.
        block_h: heads of each of them.
        block_k: keys that a program reads per step; a power of two, at least 16.
        splits: programs that share the keys of a tile; a second kernel sums their results.
        num_warps: warps per program.
        num_stages: pipeline stages, including the current one.
        keys_first: products are transposed, so that a tile of few rows fills the MMA instructions of Hopper.
    """

    block_q: int
    block_h: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    keys_first: bool

    def __post_init__(self) -> None:
        if min(self.block_q, self.block_h, self.num_warps, self.num_stages) < 1:
            raise ValueError(f"{self}: block_q, block_h, num_warps and num_stages are at least 1")
        if self.block_k < MIN_DOT_SIZE or self.block_k & (self.block_k - 1):
            raise ValueError(f"{self}: block_k is a power of two of at least {MIN_DOT_SIZE}")
        if not 1 <= self.splits <= MAX_SPLITS:
            raise ValueError(f"{self}: splits is 1 ... {MAX_SPLITS}")

    @property
    def rows(self) -> int:
        """Rows of a tile, padded."""
        return dot_block(self.block_q * self.block_h)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What tiles depend on.

    Attributes:
        queries: tokens that attend, of all members of the batch.
        heads: of each of them.
        together: tokens that see nearly the same keys, one beside the other.
        keys: most that a token may see.
        latent: channels of keys and values.
        rest: channels of the keys only.
        itemsize: bytes of an MMA operand.
        stored: bytes of a stored number.
    """

    queries: int
    heads: int
    together: int
    keys: int
    latent: int
    rest: int
    itemsize: int
    stored: int

    @property
    def channels(self) -> int:
        return dot_block(self.latent) + (dot_block(self.rest) if self.rest else 0)


def heuristic(problem: Problem, target: Target) -> LatentAttentionConfig:
    """As many rows as registers hold; then as many splits as fill the device in the fewest steps."""
    rows = _max_rows(problem)
    heads = min(problem.heads, rows)
    tokens = max(1, min(rows // heads, next_power_of_2(problem.together)))
    return next(_of_rows(problem, target, tokens, heads))


def search_space(problem: Problem, target: Target) -> list[LatentAttentionConfig]:
    """The heuristic's tile and one of one token or half the heads, with long and short steps; the heuristic's splits, half and
    twice as many."""
    chosen = heuristic(problem, target)
    found = list(_of_rows(problem, target, chosen.block_q, chosen.block_h))
    if chosen.rows > MIN_DOT_SIZE:
        half = (1, chosen.block_h if chosen.block_q > 1 else -(-chosen.block_h // 2))
        found += list(_of_rows(problem, target, *half))[:2]
    most = max_splits(problem, chosen.block_k)
    counts = {min(count, most) for count in (chosen.splits // 2, 2 * chosen.splits) if count} - {chosen.splits}
    return [*dict.fromkeys([*found, *(dataclasses.replace(chosen, splits=count) for count in sorted(counts))])]


def max_splits(problem: Problem, block_k: int) -> int:
    return max(1, min(MAX_SPLITS, -(-problem.keys // block_k)))


def _max_rows(problem: Problem) -> int:
    """fp32 products have no tensor cores, and hold their operands in registers."""
    return MIN_DOT_SIZE if problem.itemsize == 4 else MAX_ROWS


def _of_rows(problem: Problem, target: Target, tokens: int, heads: int) -> Iterator[LatentAttentionConfig]:
    """Configs of one tile, the best guess first."""
    rows = dot_block(tokens * heads)
    hopper = (target.capability or _WGMMA) >= _WGMMA
    limit = shared_memory_limit(target)
    for keys_first, block_k, warps, most in _steps(problem, rows, hopper):
        # Buffers that wgmma reads stay in use for a stage more.
        stages = next((n for n in range(most, 1, -1) if _bytes(problem, rows, block_k, n - (not hopper)) <= limit), 1)
        beside = max(1, min(_MOST_WARPS // warps, limit // _bytes(problem, rows, block_k, stages - (not hopper))))
        splits = splits_of(problem, target, tokens, heads, block_k, beside)
        yield LatentAttentionConfig(tokens, heads, block_k, splits, warps, stages, keys_first)


def _steps(problem: Problem, rows: int, hopper: bool) -> list[tuple[bool, int, int, int]]:
    """keys_first, block_k, num_warps and the most stages."""
    if problem.itemsize == 4:
        return [(False, 16, 8 if problem.channels > 256 else 4, 2)]
    most = max(MIN_DOT_SIZE, min(64, next_power_of_2(problem.keys)))
    short = min(32, most)
    few = rows < _WGMMA_ROWS
    warps = 8 if rows * dot_block(problem.latent) > 32 * MAX_LATENT else 4
    if not hopper:
        return [(few, short, warps, 3), (few, most, warps, 2), (not few, short, warps, 3)]
    if not few:
        return [(False, most, warps, 3), (False, short, warps, 4)]
    if (
        problem.stored < problem.itemsize
    ):  # transposed, converted keys are operands in registers, which no asynchronous copy fills
        return [(False, short, 4, 4), (False, most, 8, 3), (True, most, 4, 3)]
    return [(True, most, 4, 3), (True, most, 8, 3), (False, short, 4, 3)]


def _bytes(problem: Problem, rows: int, block_k: int, buffers: int) -> int:
    """Shared memory of queries, keys that are read and on their way, converted copies of 8-bit ones, and what else is needed."""
    tile = block_k * problem.channels
    converted = tile * problem.itemsize if problem.stored != problem.itemsize else 0
    return rows * problem.channels * problem.itemsize + max(buffers, 1) * tile * problem.stored + converted + _SPARE


def splits_of(problem: Problem, target: Target, tokens: int, heads: int, block_k: int, beside: int = 1) -> int:
    """The number with the fewest steps until the last program is done, each split costing what its results' traffic does.

    Args:
        problem: what is split.
        target: of the call.
        tokens, heads: of a tile.
        block_k: keys of a step.
        beside: programs that a multiprocessor runs at once.
    """
    tiles = max(1, -(-problem.queries // tokens) * -(-problem.heads // heads))
    programs = beside * (multiprocessors(target) or DEFAULT_MULTIPROCESSORS)
    blocks = max(-(-problem.keys // block_k), 1)
    rows = dot_block(tokens * heads)
    extra = 1 + 4 * rows / MAX_ROWS

    def steps(count: int) -> float:
        waves = -(-tiles * count // programs)
        return waves * (-(-blocks // count) + (extra if count > 1 else 0)) + (2 + count / 16 if count > 1 else 0)

    return min(range(1, max_splits(problem, block_k) + 1), key=steps)


@dataclasses.dataclass(frozen=True)
class LatentGradientConfig:
    """How gradients are tiled.

    Attributes:
        block_q: query tokens of a tile of rows.
        block_h: heads of each of them.
        block_k: keys that a program reads per step, or owns at most; a power of two, at least 16.
        num_warps: warps per program.
        num_stages: pipeline stages, including the current one.
    """

    block_q: int
    block_h: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if min(self.block_q, self.block_h, self.num_warps, self.num_stages) < 1:
            raise ValueError(f"{self}: block_q, block_h, num_warps and num_stages are at least 1")
        if self.block_k < MIN_DOT_SIZE or self.block_k & (self.block_k - 1):
            raise ValueError(f"{self}: block_k is a power of two of at least {MIN_DOT_SIZE}")

    @property
    def rows(self) -> int:
        """Rows of a tile, padded."""
        return dot_block(self.block_q * self.block_h)


def gradient_heuristic(problem: Problem, target: Target) -> LatentGradientConfig:
    return next(_gradient_configs(problem, target))


def gradient_space(problem: Problem, target: Target) -> list[LatentGradientConfig]:
    return list(dict.fromkeys(_gradient_configs(problem, target)))


def _gradient_configs(problem: Problem, target: Target) -> Iterator[LatentGradientConfig]:
    """Both a tile's queries and its cotangents stay in shared memory, or come by for each block of keys."""
    exact = problem.itemsize == 4
    wide = dot_block(problem.latent) > 128
    hopper = (target.capability or _WGMMA) >= _WGMMA
    shapes = ((16, 16, 8 if wide else 4, 1),) if exact else _GRADIENTS if hopper else _GRADIENTS[3:]
    for rows, block_k, warps, stages in shapes:
        heads = min(problem.heads, rows)
        tokens = max(1, min(rows // heads, next_power_of_2(problem.together)))
        held = dot_block(tokens * heads) * (problem.channels + dot_block(problem.latent)) * problem.itemsize
        held += stages * block_k * problem.channels * problem.itemsize + _SPARE
        if exact or (rows, block_k) == (16, 16) or held <= shared_memory_limit(target):
            block_k = min(block_k, dot_block(problem.keys))
            yield LatentGradientConfig(tokens, heads, block_k, warps if wide else 4, stages)


_GRADIENTS = ((64, 32, 8, 1), (64, 16, 8, 1), (64, 32, 8, 2), (32, 16, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))
"""Rows, keys, warps and stages. Before Hopper more than 32 rows, or as many keys, spill."""
