"""How `delta_rule` is cut: chunks of tokens, segments of chunks and channels of value, with warps and pipeline depth."""

from __future__ import annotations

import dataclasses
import itertools

from ejkernel.operations.delta_rule.interface import DeltaRuleCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel_triton._blocks import MIN_DOT_SIZE, dot_block
from ejkernel_triton._capability import multiprocessors, shared_memory_limit


def _check_tile(name: str, size: int) -> None:
    if size < MIN_DOT_SIZE or size & (size - 1):
        raise ValueError(f"{name}: got {size}, expected a power of two from {MIN_DOT_SIZE} on")


def _check_segments(segments: int) -> None:
    if segments < 1:
        raise ValueError(f"segments: got {segments}, expected at least 1")


@dataclasses.dataclass(frozen=True)
class Config:
    """Forward.

    Attributes:
        chunk_size: tokens between two states, a power of two; 0 = recurrent, token after token.
        block_v: value channels of one program's state, a power of two.
        num_warps: warps per program that holds a state.
        num_stages: pipeline stages of the loop over chunks.
        segments: parts of each sequence whose states are scanned in parallel, from states that another scan finds first. The
            general form, and calls that run token after token, run as with 1.
    """

    chunk_size: int
    block_v: int
    num_warps: int
    num_stages: int
    segments: int = 1

    def __post_init__(self) -> None:
        _check_segments(self.segments)
        if self.chunk_size:
            _check_tile("chunk_size", self.chunk_size)
            _check_tile("block_v", self.block_v)


@dataclasses.dataclass(frozen=True)
class GradientConfig:
    """Backward.

    Attributes:
        chunk_size: tokens between two states, a power of two.
        block_v: value channels of one program's state, a power of two.
        num_warps: warps per program that holds a state.
        num_stages: pipeline stages of the loop over chunks.
        gradient_block_k: key channels of a program of the gradient kernel, a power of two.
        gradient_block_v: value channels that it loads at a time, a power of two.
        gradient_num_warps: its warps.
        segments: as forward, for states and their gradients.
    """

    chunk_size: int
    block_v: int
    num_warps: int
    num_stages: int
    gradient_block_k: int
    gradient_block_v: int
    gradient_num_warps: int
    segments: int = 1

    def __post_init__(self) -> None:
        _check_segments(self.segments)
        for name in ("chunk_size", "block_v", "gradient_block_k", "gradient_block_v"):
            _check_tile(name, getattr(self, name))


_FEW_TOKENS = 8
"""Of a sequence, that are walked one after the other."""

_SEGMENTS = (16, 8, 4, 1)
"""Two never pay: each token is walked twice, once for the state before its segment."""

_SEGMENT_CHUNKS = 16
"""Fewest chunks of a segment, whose work is to be more than the carrying of its state."""


def _few_tokens(call: DeltaRuleCall) -> bool:
    return call.query.shape[1] <= _FEW_TOKENS * call.sequences


def is_general(call: DeltaRuleCall) -> bool:
    """Whether a or b is an array of its own."""
    return call.a is not None or call.b is not None


class _Model:
    """What tiles take of a device."""

    def __init__(self, call: DeltaRuleCall, target: Target) -> None:
        self.call = call
        self.width, self.channels = dot_block(call.query.shape[3]), dot_block(call.value.shape[3])
        self.itemsize = 2 if call.query.dtype == "bfloat16" else 4
        self.limit = shared_memory_limit(target)
        self.programs = call.query.shape[0] * call.sequences * call.heads
        self.multiprocessors = multiprocessors(target) or 100
        self.split, self.general = call.query.dtype != "bfloat16", is_general(call)
        self.on_warpgroups = target.capability is None or target.capability >= (9, 0)

    @property
    def chunk(self) -> int:
        """Products of float32 keep both halves of their operands in registers. Pairs of the general form are of four kinds."""
        most = 16 if self.split and self.general else 32 if self.split or self.general else 64
        return min(most, dot_block(self.call.query.shape[1]))

    @property
    def widest(self) -> int:
        """Channels of value beyond which such a state leaves the registers; before Hopper operands lie there too."""
        if self.split or (self.width > 128 and not self.on_warpgroups):
            return 16
        return 32 if self.width > 128 or not self.on_warpgroups else 64

    def walk_fits(self, chunk: int, block: int, stages: int, *, backward: bool) -> bool:
        keys = 4 if self.general else 3 if self.call.decays_by_channel else 2
        values = 3 if self.general else 2 if backward else 1
        per_token = keys * self.width + block * values + (0 if self.general else 2 * chunk)
        held = self.width * block + 3 * chunk * block
        return self.itemsize * (stages * chunk * per_token + held) <= self.limit

    def blocks(self) -> list[int]:
        """Channels of a program: few, so that every multiprocessor has one."""
        return [block for block in (16, 32, 64, 128) if block <= self.channels]

    def walks(self, *, backward: bool) -> list[tuple[int, int, int]]:
        """Block, warps and stages."""
        found = ((block, 8 if block == 128 else 4, depth) for block, depth in itertools.product(self.blocks(), (1, 2, 3)))
        return [x for x in found if self.walk_fits(self.chunk, x[0], x[2], backward=backward)] or [(self.blocks()[0], 4, 1)]

    def segments(self) -> list[int]:
        """Numbers of segments to choose from: several where the narrowest programs leave multiprocessors idle."""
        chunks = self.call.query.shape[1] // max(self.call.sequences * self.chunk, 1)
        if self.general or self.share(self.blocks()[0]) > 1:
            return [1]
        return [count for count in _SEGMENTS if count == 1 or chunks >= count * _SEGMENT_CHUNKS]

    def share(self, block: int, segments: int = 1) -> float:
        """Programs for each multiprocessor."""
        return self.programs * segments * -(-self.channels // block) / self.multiprocessors

    def preferred_segments(self) -> int:
        """Several where the widest block leaves most multiprocessors idle: as few as fill them with it."""
        counts = self.segments()
        widest = max(block for block in self.blocks() if block <= (32 if self.call.decays_by_channel else self.widest))
        if self.share(widest) > 0.3:
            return 1
        return min((count for count in counts if self.share(widest, count) >= 0.75), default=counts[0])

    def preferred(self, segments: int, *, backward: bool) -> tuple[int, int, int]:
        """The widest block with which every multiprocessor has a program, the deepest pipeline that fits."""
        walks = self.walks(backward=backward)
        blocks = sorted({block for block, _, _ in walks if block <= self.widest}, reverse=True)
        enough = [block for block in blocks if self.share(block, segments) >= 0.75]
        block = enough[0] if enough else blocks[-1]
        stages = max(stages for width, _, stages in walks if width == block and stages <= (1 if self.split else 3))
        return block, 4, stages


def _steps(call: DeltaRuleCall) -> Config:
    """Token after token: wide blocks to read a state once, one warp where many tokens make latency count."""
    width, channels = dot_block(call.query.shape[3]), dot_block(call.value.shape[3])
    if _few_tokens(call):
        return Config(0, min(channels, 32), 4, 1)
    return Config(0, min(channels, max(256 // width, 4)), 1, 3)


def forward_heuristic(call: DeltaRuleCall, target: Target) -> Config:
    if not call.use_chunked or _few_tokens(call):
        return _steps(call)
    model = _Model(call, target)
    segments = model.preferred_segments()
    return Config(model.chunk, *model.preferred(segments, backward=False), segments)


def forward_space(call: DeltaRuleCall, target: Target) -> list[Config]:
    chosen = forward_heuristic(call, target)
    if not chosen.chunk_size:
        channels, few = dot_block(call.value.shape[3]), _few_tokens(call)
        tiles = ((16, 32, 64), (1, 2, 4)) if few else ((4, 8, 16), (1,))
        found = [Config(0, block, warps, chosen.num_stages) for block, warps in itertools.product(*tiles) if block <= channels]
        return list(dict.fromkeys([chosen, *found]))
    model = _Model(call, target)
    found = [Config(model.chunk, *model.preferred(count, backward=False), count) for count in model.segments()]
    found += [Config(model.chunk, *walk, chosen.segments) for walk in model.walks(backward=False)]
    return list(dict.fromkeys([chosen, *found]))


def _rows(model: _Model) -> int:
    """Few under decays per channel, of which every program holds many tiles."""
    few = model.split or (model.call.decays_by_channel and not model.general)
    return min(model.width, 32 if few else 64 if model.general else 128)


def backward_heuristic(call: DeltaRuleCall, target: Target) -> GradientConfig:
    model = _Model(call, target)
    rows = _rows(model)
    columns = min(model.channels, 32 if model.split else 64)
    segments = model.preferred_segments()
    walk = model.preferred(segments, backward=True)
    return GradientConfig(model.chunk, *walk, rows, columns, 8 if rows >= 128 else 4, segments)


def backward_space(call: DeltaRuleCall, target: Target) -> list[GradientConfig]:
    model, chosen = _Model(call, target), backward_heuristic(call, target)
    walks = [(walk, chosen.segments) for walk in model.walks(backward=True)]
    walks += [(model.preferred(count, backward=True), count) for count in model.segments()]
    found = [
        dataclasses.replace(chosen, block_v=block, num_warps=warps, num_stages=stages, segments=segments)
        for (block, warps, stages), segments in walks
    ]
    for rows, columns, warps in itertools.product((32, 64, 128), (32, 64), (4, 8)):
        if rows <= min(model.width, 64 if model.general else 128) and columns <= model.channels and not model.split:
            found.append(dataclasses.replace(chosen, gradient_block_k=rows, gradient_block_v=columns, gradient_num_warps=warps))
    return list(dict.fromkeys([chosen, *found]))


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(GradientConfig, backward_heuristic, backward_space)
