"""Configs of `paged_attention` on TPU, limited by VMEM."""

from __future__ import annotations

import dataclasses
import itertools
import math

from ejkernel.operations.paged_attention.interface import PagedAttentionCall
from ejkernel.plugin import ConfigSpace, Target
from ejkernel.utils.renamed_knobs import renamed_knobs
from ejkernel_pallas.tpu._pages import ITEMSIZE, sources, stored_bytes
from ejkernel_pallas.tpu._vmem import LANES, block_bytes, memory_of

HEIGHTS = (8, 16, 32, 64, 128, 256)
"""Tokens of a tile."""
_KEYS = 512
"""Keys per step: their copy takes longer than the latency to start it."""
_MAX_ROWS = 1024
"""Largest number of score rows of one key head."""
_TOGETHER = 64
"""Rows up to which key heads of a decoding token share one softmax, to fill sublanes."""
_MAX_TOGETHER = 16
_SCORES = 6
"""float32 score tiles that the compiler keeps in VMEM."""
_SLACK = 1 << 20
_TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")


@renamed_knobs(tokens="block_q", pages="pages_per_block")
@dataclasses.dataclass(frozen=True)
class Config:
    """Attributes:
    block_q: largest number of new tokens of an item: 1, or a power of two of at least 8.
    pages_per_block: pages of a request, read in one step.
    cores: cores of the grid, over which items are distributed.
    """

    block_q: int
    pages_per_block: int
    cores: int = 1

    def __post_init__(self) -> None:
        if self.block_q != 1 and (self.block_q < 8 or self.block_q & (self.block_q - 1)):
            raise ValueError(f"block_q: got {self.block_q}, expected 1, or a power of two from 8 on")
        for name in ("pages_per_block", "cores"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")


def product_dtype(call: PagedAttentionCall) -> str:
    return "float32" if "float32" in (call.query.dtype, call.key_pages.dtype) else "bfloat16"


def least_pages(call: PagedAttentionCall) -> int:
    """Fewest pages of a step with whole sublanes."""
    return 8 // math.gcd(max(call.pages.page_size, 1), 8)


def pages_of_step(call: PagedAttentionCall, keys: int) -> int:
    """Pages of about `keys` keys, at most as many as a request can have."""
    keys = min(keys, -(-call.longest // LANES) * LANES)
    unit = least_pages(call)
    return max(keys // max(call.pages.page_size, 1) // unit, 1) * unit


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of a kernel.

    Attributes:
        group: query heads of a key head.
        together: key heads that share one softmax, for items of one token and for others.
        rows: of a pass, the maximum over both.
    """

    tokens: int
    pages: int
    keys: int
    heads: int
    group: int
    together: tuple[int, int]

    @classmethod
    def of(cls, call: PagedAttentionCall, config: Config) -> Shape:
        heads = call.heads
        group = call.query.shape[2] // heads
        divisors = [count for count in range(1, heads + 1) if heads % count == 0]
        alone = max(count for count in divisors if count == 1 or (count <= _MAX_TOGETHER and count * group <= _TOGETHER))
        return cls(
            config.block_q, config.pages_per_block, config.pages_per_block * call.pages.page_size, heads, group, (alone, 1)
        )

    def passes(self, tokens: int) -> int:
        return self.heads // self.of_pass(tokens)

    def of_pass(self, tokens: int) -> int:
        return self.together[0 if tokens == 1 else 1]

    @property
    def most_passes(self) -> int:
        return max(self.passes(tokens) for tokens in {1, self.tokens})

    @property
    def rows(self) -> int:
        return max(self.of_pass(tokens) * self.group * tokens for tokens in {1, self.tokens})


def vmem_bytes(call: PagedAttentionCall, config: Config) -> int:
    """Upper bound of the VMEM."""
    shape, product = Shape.of(call, config), product_dtype(call)
    size, value_size, heads = call.query.shape[3], call.value_size, call.query.shape[2]
    itemsize, total = ITEMSIZE[call.key_pages.dtype], _SLACK
    widest = 0
    for source in sources(call):
        total += 2 * stored_bytes((config.pages_per_block, *source.block), itemsize)
        if source.token_major:
            total += block_bytes((shape.keys * source.rows, source.width), "float32")
            widest = max(widest, 64 * block_bytes((source.rows, source.width), "float32") * 2)
    total += widest
    total += 2 * stored_bytes((config.block_q, heads, size), ITEMSIZE[call.query.dtype])
    total += stored_bytes((config.block_q, heads, value_size), ITEMSIZE[call.query.dtype])
    total += block_bytes((config.block_q * heads, size), "float32") + block_bytes(
        (config.block_q * heads, value_size), "float32"
    )
    rows, passes = shape.rows, shape.most_passes
    total += block_bytes((passes, rows, size), product)
    total += block_bytes((passes, rows, value_size), "float32") + 2 * block_bytes((passes, rows, LANES), "float32")
    total += block_bytes((8, shape.keys), "float32")
    total += 2 * block_bytes((config.block_q, heads), "float32")
    total += sum(
        2 * block_bytes((heads, shape.group, LANES), "float32") for spec in (call.softmax_aux, call.alibi_slopes) if spec
    )
    if call.qq_bias is not None:
        width = call.qq_bias.shape[-1]
        total += 2 * 2 * block_bytes((width, width), "float32") + 4 * block_bytes(
            (max(config.block_q, 8), shape.keys), "float32"
        )
        total += 3 * block_bytes((width, shape.keys), "float32") + 4 * block_bytes((max(config.block_q, 8), width), "float32")
    total += _SCORES * block_bytes((rows, shape.keys), "float32")
    operands = block_bytes((shape.keys, size), "float32") + 3 * block_bytes((shape.keys, value_size), "float32")
    operands += 2 * block_bytes((rows, size), "float32") + 3 * block_bytes((rows, value_size), "float32")
    if product == "float32":  # multiplied as sums of narrower parts
        operands += 2 * block_bytes((rows, shape.keys), "float32") + operands
    return total + operands


def cores_of(target: Target) -> int:
    """Cores of one device."""
    return 2 if target.device_kind in _TWO_CORES else 1


def smallest(call: PagedAttentionCall) -> Config:
    return Config(1, least_pages(call))


def _most_tokens(call: PagedAttentionCall) -> int:
    """As many as an average request has, limited by useful rows."""
    tokens, requests = call.query.shape[1], max(call.kv_lens.shape[1], 1)
    if tokens <= requests:
        return 1
    average = 1 << (-(-tokens // requests) - 1).bit_length()
    rows = max(_MAX_ROWS // (call.query.shape[2] // call.heads), HEIGHTS[0])
    return max(height for height in HEIGHTS if height == HEIGHTS[0] or height <= min(average, rows, 128))


def _fitting(call: PagedAttentionCall, target: Target) -> list[Config]:
    """All configs that fit, the largest first."""
    most = _most_tokens(call)
    heights = [height for height in (1, *HEIGHTS) if height <= most]
    keys = {pages_of_step(call, keys) for keys in (_KEYS, 256, 128, 64, 32, 16, 8, 1)}
    cores = cores_of(target)
    configs = [Config(tokens, pages, cores) for tokens, pages in itertools.product(sorted(heights)[::-1], sorted(keys)[::-1])]
    return [config for config in configs if vmem_bytes(call, config) <= memory_of(target).vmem]


def heuristic(call: PagedAttentionCall, target: Target) -> Config:
    """Of the configs with steps of at least 128 keys, the one with most tokens, which load the pages once."""
    fitting = _fitting(call, target) or [smallest(call)]
    least = min(128, max(config.pages_per_block for config in fitting) * call.pages.page_size)
    wide = [config for config in fitting if config.pages_per_block * call.pages.page_size >= least]
    return max(wide or fitting, key=lambda config: (config.block_q, config.pages_per_block))


def search_space(call: PagedAttentionCall, target: Target) -> list[Config]:
    chosen = heuristic(call, target)
    steps = {pages_of_step(call, keys) for keys in (128, 256, 512, 1024)}
    heights = (
        {1} if chosen.block_q == 1 else {chosen.block_q, max(chosen.block_q // 2, 8), min(chosen.block_q * 2, HEIGHTS[-1])}
    )
    pairs = itertools.product(sorted(heights), sorted(steps | {chosen.pages_per_block}))
    found = [Config(tokens, pages, chosen.cores) for tokens, pages in pairs]
    found = [config for config in found if vmem_bytes(call, config) <= memory_of(target).vmem]
    return found if chosen in found else [chosen, *found]


FORWARD = ConfigSpace(Config, heuristic, search_space)
