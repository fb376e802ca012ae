"""Configs of `linear_recurrence`: chunk and segment sizes, value block, warps and pipeline stages."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from ejkernel.operations.linear_recurrence.interface import LinearRecurrenceCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_triton._blocks import MIN_DOT_SIZE, dot_block
from ejkernel_triton._capability import shared_memory_limit
from ejkernel_triton.linear_recurrence.params import WIDEST_VALUE, as_computed, product_precision


@renamed_knobs(chunk="chunk_size", segment="segment_size", block="block_v")
@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    chunk_size: tokens between two states, a power of two; 0 = token after token (forward without cu_seqlens only).
    segment_size: tokens of one program, a multiple of chunk_size; 0 = a whole sequence (forward without cu_seqlens only).
    block_v: value channels of one program's state; a power of two.
    num_warps: warps per program: 4, or 8 for a block_v of 128 and a chunk_size of 64, with decays per head.
    num_stages: pipeline stages of the loop over chunks, and of that over heads with store_states.
    store_states: backward only: store the states of all chunks, then compute the gradients of all chunks at once, in programs of
        num_warps warps and without segments. Calls for which `can_store_states` is False run as without.
    """

    chunk_size: int
    segment_size: int
    block_v: int
    num_warps: int
    num_stages: int
    store_states: bool = False

    def __post_init__(self) -> None:
        for name, size in (("chunk_size", self.chunk_size or MIN_DOT_SIZE), ("block_v", self.block_v)):
            if size < MIN_DOT_SIZE or size & (size - 1):
                raise ValueError(f"{name}: got {size}, expected a power of two from {MIN_DOT_SIZE} on")
        if self.segment_size < 0 or (self.segment_size % self.chunk_size if self.chunk_size else self.segment_size):
            raise ValueError(
                f"segment_size: got {self.segment_size}, expected 0 or a multiple of chunk_size, {self.chunk_size}"
            )


def can_store_states(call: LinearRecurrenceCall) -> bool:
    """Whether there are kernels for gradients from the stored states of all chunks: in bfloat16, with scalar decays, and queries
    and keys that the same heads share, of up to 128 channels, whose gradients registers hold."""
    return (
        call.query.dtype == "bfloat16"
        and (call.g is not None or call.g_gamma is not None)
        and call.gk is None
        and call.query.shape[2] == call.key.shape[2]
        and call.query.shape[3] <= 128
    )


class _Model:
    """Shared memory and registers of a config, and the properties of the call that they depend on."""

    def __init__(self, call: LinearRecurrenceCall, target: Target, *, backward: bool) -> None:
        call = as_computed(call, backward=backward)
        self.call, self.backward = call, backward
        self.width, self.channels = dot_block(call.query.shape[3]), dot_block(min(call.value.shape[3], WIDEST_VALUE))
        self.itemsize = 4 if call.query.dtype == "float32" else 2
        self.wide = call.query.dtype != "bfloat16"
        self.exact = self.itemsize == 4 and product_precision(call) == "ieee"
        self.limit = shared_memory_limit(target)
        self.per_channel = call.gk is not None
        self.split = self.itemsize == 4 and not self.exact
        self.on_warpgroups = target.capability is None or target.capability >= (9, 0)

    def chunks(self) -> tuple[int, ...]:
        """float32 dots without tensor cores are unrolled: larger tiles take minutes to compile."""
        longest = dot_block(self.call.query.shape[1])
        sizes = (16,) if self.exact else (64, 32) if self.wide else (64,)
        return tuple(dict.fromkeys(min(size, longest) for size in sizes))

    def matmuls(self) -> Iterable[tuple[int, int]]:
        """Key and value widths of every recurrence of the phase."""
        yield self.width, self.channels
        if self.backward:
            yield self.channels, self.width

    def blocks(self) -> tuple[int, ...]:
        widest = max(channels for _, channels in self.matmuls())
        return tuple(block_v for block_v in (16, 32, 64, 128) if block_v <= max(widest, 16))

    def fits(self, config: Config) -> bool:
        return all(self._part_fits(config, width, min(config.block_v, channels)) for width, channels in self.matmuls())

    def _part_fits(self, config: Config, width: int, block_v: int) -> bool:
        per_token = self.itemsize * (2 * width + block_v)
        if self.per_channel:
            per_token += (4 * block_v if self.backward else config.chunk_size) * self.itemsize + 4 * (
                block_v if self.backward else 0
            )
        held = (4 if self.wide else 2) * width * block_v
        shared = (
            config.num_stages * config.chunk_size * per_token
            + held
            + 2 * self.itemsize * config.chunk_size * max(block_v, config.chunk_size)
        )
        registers = width * block_v + config.chunk_size * (block_v + config.chunk_size)
        return shared <= self.limit and registers <= 32 * config.num_warps * 144


def _choices(model: _Model, segments: tuple[int, ...]) -> list[Config]:
    """Configs with four warps. Eight warps, which use transposed tiles, are only reachable through `cfg=` until their numbers
    are checked on a device."""
    blocks, depths = [block_v for block_v in model.blocks()[-3:] if block_v <= 64], (2, 3)
    if model.split:
        blocks, depths = (
            [min(block_v, model.blocks()[-1]) for block_v in ((32, 64) if model.on_warpgroups else (16, 32))],
            (1, 2),
        )
    chunk_size = min(_bounds(model).chunk_size, model.chunks()[0])
    found = [
        Config(chunk_size, segment_size, block_v, 4, depth)
        for block_v, depth, segment_size in itertools.product(blocks, depths, segments)
    ]
    return [config for config in found if model.fits(config)]


def _with_stored_states(model: _Model) -> list[Config]:
    """For heads that share keys on Hopper, where they spill up to 88 bytes; before it only chunks of 32 tokens spill nothing. One
    set of states is held."""
    call = model.call
    if not (model.backward and model.on_warpgroups and call.query.shape[1] >= 512 and can_store_states(call)):
        return []
    if call.heads[1] == call.key.shape[2]:
        return []
    blocks = ((64, 4, 2), (64, 8, 2), (32, 4, 2), (32, 4, 3))
    return [
        Config(64, _backward_segments(call)[-1], block_v, num_warps, num_stages, True)
        for block_v, num_warps, num_stages in blocks
        if block_v <= model.channels
    ]


def _smallest(model: _Model, segment_size: int) -> Config:
    """A config that fits everywhere."""
    return Config(min(model.chunks()[-1], 32), segment_size, 16, 4, 1)


class _Bounds(NamedTuple):
    """Largest chunk and value block of a heuristic, and the pipeline stages that it tries."""

    chunk_size: int
    block_v: int
    depths: tuple[int, ...] = (2, 1)


def _bounds(model: _Model) -> _Bounds:
    """Up to 64 channels, so that two programs fit on a multiprocessor; fewer for gradients of decays per channel.

    3xTF32 splits tiles in registers. On Hopper every tile spills for heads beyond 64; with one pipeline stage two programs
    still fit on a multiprocessor. Before Hopper both MMA operands lie in registers and larger float32 tiles spill; for narrower
    dtypes one stage spills half as much as two.
    """
    wide = max(width for width, _ in model.matmuls()) > 64
    if model.exact or (model.per_channel and model.backward and not model.split):
        return _Bounds(64, 32)
    if not model.split:
        return _Bounds(64, 64, (2, 1) if model.on_warpgroups or not wide else (1,))
    if model.on_warpgroups:
        return _Bounds(64, 64, (1,)) if wide else _Bounds(64, 32)
    return _Bounds(32, 16 if wide else 32, (1,))


def _preferred(model: _Model, segment_size: int) -> Config:
    bounds = _bounds(model)
    for chunk_size in model.chunks():
        for block_v in sorted(model.blocks(), reverse=True):
            for depth in bounds.depths:
                config = Config(chunk_size, segment_size, block_v, 4, depth)
                if chunk_size <= bounds.chunk_size and block_v <= bounds.block_v and model.fits(config):
                    return config
    return _smallest(model, segment_size)


def _segment(call: LinearRecurrenceCall) -> int:
    """1024 tokens, or 512 if that gives fewer than 512 programs, too few for a large device."""
    batch, length = call.query.shape[:2]
    rows = batch * call.heads[1] * -(-call.value.shape[3] // 64)
    return 1024 if rows * length // 1024 >= 512 else 512


_FILLING = 96
"""Programs of whole sequences that keep a large device busy: three quarters of an H100's multiprocessors."""


def _whole(call: LinearRecurrenceCall) -> bool:
    batch, length = call.query.shape[:2]
    return call.cu_seqlens is None and (length <= 512 or batch * call.heads[1] >= 1024)


def _in_one_pass(model: _Model) -> Config | None:
    """Long bfloat16 sequences without decays per channel on Hopper: whole sequences read keys and values once; where they are too
    few programs, eight warps take all channels of a value of 128."""
    call = model.call
    batch, length = call.query.shape[:2]
    if call.cu_seqlens is not None or model.per_channel or model.wide or not model.on_warpgroups or length <= 512:
        return None
    rows = batch * call.heads[1]
    found = []
    if rows * -(-model.channels // 64) >= _FILLING:
        found.append(Config(64, 0, min(model.channels, 64), 4, 3))
    if model.channels == 128 and rows * (length // 2048) >= _FILLING:
        found.append(Config(64, 2048, 128, 8, 3))
    return next((config for config in found if model.fits(config)), None)


_FEW_TOKENS = 8
"""Whose work is reading and writing the state, once."""


def _step_by_step(call: LinearRecurrenceCall) -> bool:
    return call.cu_seqlens is None and call.query.shape[1] <= _FEW_TOKENS


def _steps(call: LinearRecurrenceCall, warps: int = 4, block: int = 32) -> Config:
    return Config(0, 0, min(block, dot_block(call.value.shape[3])), warps, 1)


def forward_heuristic(call: LinearRecurrenceCall, target: Target) -> Config:
    if _step_by_step(call):
        return _steps(call)
    model = _Model(call, target, backward=False)
    return _in_one_pass(model) or _preferred(model, 0 if _whole(call) else _segment(call))


def backward_heuristic(call: LinearRecurrenceCall, target: Target) -> Config:
    model = _Model(call, target, backward=True)
    return next(iter(_with_stored_states(model)), None) or _preferred(model, min(_segment(call), _backward_segments(call)[-1]))


def _backward_segments(call: LinearRecurrenceCall) -> tuple[int, ...]:
    """Shorter where decays vary over tokens: chosen when their gradients were sums over the rest of a segment."""
    return (128, 256, 512) if call.g is not None or call.gk is not None else (512, 1024)


def _space(
    call: LinearRecurrenceCall, target: Target, chosen: Config, segments: tuple[int, ...], backward: bool
) -> list[Config]:
    model = _Model(call, target, backward=backward)
    longest = -(-max(call.query.shape[1], 1) // 64) * 64
    allowed = tuple(dict.fromkeys(min(segment_size, longest) for segment_size in segments))
    return list(dict.fromkeys([chosen, *_with_stored_states(model), *_choices(model, allowed)]))


def forward_space(call: LinearRecurrenceCall, target: Target) -> list[Config]:
    if _step_by_step(call):
        found = [_steps(call, warps, block) for warps, block in itertools.product((4, 2, 8), (32, 16, 64))]
        return list(dict.fromkeys(found))
    segments = (512, 1024, 2048) if call.cu_seqlens is not None else (0, 512, 1024, 2048)
    return _space(call, target, forward_heuristic(call, target), segments, False)


def backward_space(call: LinearRecurrenceCall, target: Target) -> list[Config]:
    return _space(call, target, backward_heuristic(call, target), _backward_segments(call), True)


FORWARD = ConfigSpace(Config, forward_heuristic, forward_space)
BACKWARD = ConfigSpace(Config, backward_heuristic, backward_space)
