"""Problems of `orders.py` by operation, with the parameters to begin with and how others are drawn.

bfloat16 where nothing else is usual.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import moe
import numpy as np
import row_problems
from order_grid import BOTH, EARLY, Draw, Problem, below, between, bounds, constant, drawn, normal, wide
from recurrence_problems import FAMILIES, Shape

from ejkernel.operations.quantized_matmul.cases import packed

VOCABULARY = 128256
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window1024": {"causal": True, "sliding_window": 1024},
    "window128": {"causal": True, "sliding_window": 128},
    "cap": {"causal": True, "logits_soft_cap": 50.0},
    "packed": {"causal": True},
    "sinks": {"causal": True},
    "sinks window128": {"causal": True, "sliding_window": (127, 0)},
}
SIZES = (64, 80, 96, 112, 128, 160, 192, 256)
LENGTHS = ((128, 128), (32, 512), (16, 1024), (2, 8192), (1, 32768))
HEADS = ((32, 8), (16, 16), (8, 1), (64, 8))


def attention(batch: int, tokens: int, heads: tuple[int, int], size: int | tuple[int, int], mask: str) -> Problem:
    """size: of queries and keys, and of values where that differs."""
    size, value = size if isinstance(size, tuple) else (size, size)
    width = f"{size}" if size == value else f"{size}/{value}"
    name = f"B{batch} T{tokens} H{heads[0]}/{heads[1]} D{width} {mask}"
    kind = f"D{width} T{'<=1024' if tokens <= 1024 else '>1024'} {mask}"
    without = ("xla",) if tokens > 1024 else ()
    sizes = (heads[0], size), (heads[1], size), (heads[1], value)
    if mask == "packed":
        packs = {letter: normal(batch * tokens, *one) for letter, one in zip("qkv", sizes, strict=True)}
        make = drawn(**packs, cu_seqlens_q=bounds(batch * tokens, max(batch, 4)))
        return Problem("flash_attn_varlen", name, make, MASKS[mask], BOTH, kind, without=without)
    rows = {name: normal(batch, tokens, *one) for name, one in zip(("query", "key", "value"), sizes, strict=True)}
    more = {"softmax_aux": wide(heads[0])} if mask.startswith("sinks") else {}
    return Problem("flash_attention", name, drawn(**rows, **more), MASKS[mask], BOTH, kind, without=without)


def some_attention(generator: random.Random) -> tuple[Any, ...]:
    tokens = between(generator, 128, 16384, 64)
    return max(16384 // tokens, 1), tokens, generator.choice(HEADS), generator.choice(SIZES), generator.choice([*MASKS])


ATTENTION = (
    *((4, 2048, (32, 8), size, "causal") for size in (80, 128, 96, 256, 64, 192, 112, 160)),
    *((*length, (32, 8), 128, "causal") for length in LENGTHS),
    *((4, 4096, (32, 8), 128, mask) for mask in ("full", "packed", "window128", "cap", "window1024", "sinks")),
    *((*length, (16, 16), 128, "causal") for length in LENGTHS),
    *((4, 4096, (64, 8), 64, mask) for mask in ("sinks window128", "sinks")),
    (4, 4096, (16, 16), (192, 128), "causal"),
    *((*length, (32, 8), size, "causal") for length, size in itertools.product(LENGTHS[:2], (64, 80, 256))),
    *((4, 2048, (16, 16), size, "full") for size in SIZES),
    *((4, 4096, (32, 8), 64, mask) for mask in ("full", "packed", "window128", "cap")),
    *((4, 4096, (32, 8), 96, mask) for mask in ("packed", "window1024", "cap", "window128")),
)


def pages(requests: str, held: int, room: int, heads: tuple[int, int], size: int, page: int) -> Problem:
    """requests: such as "60 x 1, 2 x 256" new tokens; held: tokens of each; room: of block tables, with pages in no order."""
    new = [int(tokens) for part in requests.split(", ") for count, tokens in [part.split(" x ")] for _ in range(int(count))]
    used, row = -(-held // page), room // page
    stored = (len(new) * used + 1, page, heads[1], size)

    def tables(key: Any) -> Any:
        order = jax.random.permutation(key, len(new) * used).astype(jnp.int32).reshape(len(new), used)
        return jnp.pad(order, ((0, 0), (0, row - used)))

    made = drawn(
        queries=normal(sum(new), heads[0], size),
        key_cache=normal(*stored),
        value_cache=normal(*stored),
        kv_lens=constant(np.full(len(new), held, np.int32)),
        block_tables=tables,
        query_start_loc=constant(np.cumsum([0, *new]).astype(np.int32)),
    )
    name = f"{requests} of {held}, room {room} H{heads[0]}/{heads[1]} D{size} page {page}"
    step = f"{'few' if len(new) < 8 else 'many'} steps" if max(new) == 1 else "prefill"
    kind = f"{step}, room {'much larger' if room > 4 * held else 'as needed'}, D{size}"
    return Problem("unified_attention", name, made, {}, ("forward",), kind, without=("xla",) if sum(new) * room > 2**18 else ())


def some_pages(generator: random.Random) -> tuple[Any, ...]:
    held = between(generator, 100, 6000)
    requests, room = between(generator, 1, 256), -(-generator.choice([1, 2, 8]) * held // 64) * 64
    return (
        f"{requests} x {generator.choice([1, 1, 1, 4])}",
        held,
        room,
        (32, 8),
        generator.choice([64, 128]),
        generator.choice([16, 64]),
    )


DECODE = tuple(
    (f"{count} x 1", held, room, (32, 8), 128, 16)
    for held, room in ((200, 1024), (200, 8192), (1000, 1024), (1000, 8192))
    for count in (1, 16, 64, 4, 256)
)
PREFILL = tuple(
    (requests, held, held, heads, size, 16)
    for heads, size in (((32, 8), 128), ((64, 8), 64))
    for requests, held in (
        ("4 x 1024", 8192),
        ("60 x 1, 2 x 256", 4096),
        ("1 x 2048", 2048),
        ("32 x 4", 4096),
        ("8 x 512", 512),
        ("60 x 1, 2 x 1024", 4096),
    )
)


RENAMED = {
    "add_rms_norm": ("fused_add_rms_norm", {}),
    "qk_norm_rope": ("fused_qk_norm_rope", {"query": "q", "key": "k", "query_scale": "q_scale", "key_scale": "k_scale"}),
    "rope": ("llama_rope", {"query": "q", "key": "k"}),
    "cross_entropy": ("fused_cross_entropy", {"x": "logits"}),
}
"""Operation -> the public function and what its arrays are called there."""


def rows(problem: row_problems.Problem, name: str = "") -> Problem:
    """Of `rows.py`. Cosines and sines, and bounds, are constants of a model."""
    function, names = RENAMED.get(problem.operation, (problem.operation, {}))
    *sizes, width = next(iter(problem.shapes.values()))

    def make() -> dict[str, Any]:
        return {names.get(name, name): array for name, array in problem.arrays(0).items()}

    moving = sorted({names.get(name, name) for name in problem.shapes} - {"cos", "sin", "targets", "cu_seqlens"})
    options = {key: value for key, value in problem.options.items() if value != "BTHD"}
    count = "few rows" if np.prod(sizes) < 512 else "rows"
    extent = "narrow" if width <= 256 else "wide" if width > 8192 else "medium"
    phases = EARLY if problem.operation == "cross_entropy" else BOTH
    name = name or problem.name.removeprefix(f"{problem.operation} ")
    return Problem(function, name, make, options, phases, f"{count}, {extent}", tuple(moving))


def norm(operation: str, count: int, width: int) -> Problem:
    shapes = {"x": (count, width), "scale": (width,)}
    if operation == "layer_norm":
        shapes["offset"] = (width,)
    return rows(row_problems.added(count, width) if operation == "add_rms_norm" else row_problems.Problem(operation, shapes))


def some_rows(generator: random.Random) -> tuple[int, int]:
    width = between(generator, 64, 65536, 8)
    return max(min(between(generator, 8, 262144), 2**27 // width), 1), width


ROWS = (
    (16384, 4096),
    (16, 4096),
    (131072, 128),
    (256, 8192),
    (2048, 32768),
    (65536, 1024),
    (1, 4096),
    (8192, 8192),
    (1024, 2048),
)


def turned(batch: int, length: int, heads: tuple[int, int], width: int, *, normed: bool) -> Problem:
    name = f"B{batch} T{length} H{heads[0]}/{heads[1]} D{width}"
    if normed:
        return rows(row_problems.norm_rotary("BTHD", batch, length, *heads, width, width), name)
    return rows(row_problems.rotary("BTHD", batch, length, *heads, width), name)


def some_turned(generator: random.Random) -> tuple[Any, ...]:
    return generator.choice([1, 4]), between(generator, 1, 8192), generator.choice(HEADS), generator.choice([64, 80, 128, 256])


TURNED = (
    (4, 4096, (32, 8), 128),
    (64, 1, (32, 8), 128),
    (4, 4096, (16, 16), 64),
    (1, 512, (32, 8), 128),
    (4, 4096, (32, 8), 256),
    (1, 1, (32, 8), 128),
)


def softmax(count: int, width: int) -> Problem:
    return rows(row_problems.Problem("softmax", {"x": (count, width)}))


def unit(count: int, width: int, activation: str, *, together: bool) -> Problem:
    shapes = {"gate": normal(count, 2 * width)} if together else {"gate": normal(count, width), "up": normal(count, width)}
    name = f"{count}x{width} {activation}{' packed' if together else ''}"
    kind = "few rows" if count < 512 else "rows"
    return Problem("gated_linear_unit", name, drawn(**shapes), {"activation": activation}, BOTH, kind)


def loss(count: int, classes: int) -> Problem:
    return rows(row_problems.Problem("cross_entropy", {"x": (count, classes), "targets": (count,)}))


def some_logits(generator: random.Random) -> tuple[int, int]:
    classes = between(generator, 8000, 160000, 8)
    return min(between(generator, 64, 16384), 2**30 // classes), classes


def hidden_loss(count: int, width: int, classes: int) -> Problem:
    made = drawn(
        hidden=normal(count, width),
        lm_head_weight=normal(width, classes, scale=max(width, 1) ** -0.5),
        targets=below(classes, count),
    )
    return Problem("fused_cross_entropy", f"hidden {count}x{width}x{classes}", made, {}, EARLY, "hidden")


def some_head(generator: random.Random) -> tuple[int, int, int]:
    return between(generator, 256, 8192, 8), between(generator, 1024, 4096, 64), between(generator, 16000, 128256, 64)


HIDDEN = ((8192, 4096, 128256), (4096, 2048, 32000), (1024, 4096, 128256), (16384, 1024, 50304))


def divergence(count: int, width: int, classes: int) -> Problem:
    """width: of hidden states; 0 = logits."""
    if not width:
        made = drawn(student_logits=normal(count, classes), teacher_logits=normal(count, classes))
        moving, name = ("student_logits",), f"{count}x{classes}"
    else:
        head = normal(width, classes, scale=max(width, 1) ** -0.5)
        names = "student_hidden", "student_head", "teacher_hidden", "teacher_head"
        made = drawn(**dict(zip(names, (normal(count, width), head) * 2, strict=True)))
        moving, name = names[:2], f"hidden {count}x{width}x{classes}"
    return Problem("fused_kl_divergence", name, made, {}, EARLY, "hidden" if width else "logits", moving)


def logprobs(count: int, width: int, classes: int) -> Problem:
    """width: of hidden states; 0 = logits."""
    given = {"hidden": normal(count, width), "lm_head_weight": normal(width, classes, scale=max(width, 1) ** -0.5)}
    made = drawn(**(given if width else {"logits": normal(count, classes)}), targets=below(classes, count))
    name = f"hidden {count}x{width}x{classes}" if width else f"{count}x{classes}"
    return Problem("token_logprobs", name, made, {}, BOTH, "hidden" if width else "logits")


def sample(count: int, classes: int, form: str) -> Problem:
    """form: "top_k top_p" in arrays, "top_k" as one number, or "plain"."""
    made = {"logits": normal(count, classes, scale=3.0), "key": constant(np.array([1, 2], np.uint32))}
    options: dict[str, Any] = {"temperature": 0.8}
    if form == "top_k top_p":
        made |= {"top_k": constant(np.full(count, 50, np.int32)), "top_p": constant(np.full(count, 0.95, np.float32))}
    elif form == "top_k":
        options["top_k"] = 50
    kind = f"{'few' if count < 64 else 'many'} rows, {form}"
    return Problem("sample_tokens", f"{count}x{classes} {form}", drawn(**made), options, ("forward",), kind)


def grouped(count: int, groups: int, inner: int, columns: int) -> Problem:
    """Groups of unequal sizes."""
    shares = np.random.default_rng(0).dirichlet(np.full(groups, 4.0))
    sizes = np.random.default_rng(1).multinomial(count, shares).astype(np.int32)
    made = drawn(lhs=normal(count, inner), rhs=normal(groups, inner, columns, scale=inner**-0.5), group_sizes=constant(sizes))
    kind = f"{'few' if count < 32 * groups else 'some' if count < 256 * groups else 'many'} rows of a group"
    return Problem("grouped_matmul", f"M{count} E{groups} {inner}x{columns}", made, {}, BOTH, kind)


def some_groups(generator: random.Random) -> tuple[int, int, int, int]:
    count, groups = between(generator, 16, 32768, 8), generator.choice([4, 8, 16, 32, 64, 128])
    return count, groups, *(between(generator, 512, 5760 if groups < 64 else 2880, 64) for _ in range(2))  # pyright: ignore


GROUPS = (
    (128, 64, 2880, 2880),
    (16384, 64, 2048, 1408),
    (8192, 8, 4096, 14336),
    (16, 64, 2880, 2880),
    (1024, 64, 2880, 2880),
    (4096, 64, 2048, 1408),
    (64, 8, 4096, 14336),
    (32768, 128, 2048, 768),
)


def quantized(count: int, inner: int, columns: int, form: tuple[str, int, int], *, transpose: bool) -> Problem:
    """form: mode, bits and size of a group."""
    stored = (columns, inner) if transpose else (inner, columns)

    def make() -> dict[str, Any]:
        one = packed(np.random.default_rng(0), 8, stored[1], *form)
        repeated = {name: jnp.tile(value, (stored[0] // 8, 1)) for name, value in one.items()}
        return {"x": normal(count, inner, scale=inner**-0.5)(jax.random.key(0)), **repeated}

    options = {"mode": form[0], "bits": form[1], "group_size": form[2], "transpose": transpose}
    name = f"{count}x{inner}x{columns} {form[0]}{form[1]}{' transposed' if transpose else ''}"
    kind = "few rows" if count <= 64 else "rows"
    return Problem("quantized_matmul", name, make, options, BOTH if count > 16 else ("forward",), kind, moving=("x",))


FORMS = (("affine", 4, 64), ("affine", 8, 64), ("nf4", 4, 64), ("mxfp4", 4, 32), ("nvfp4", 4, 16))


def some_quantized(generator: random.Random) -> tuple[Any, ...]:
    sizes = between(generator, 1, 4096), *(between(generator, 1024, 14336, 128) for _ in range(2))
    return *sizes, generator.choice(FORMS)


def scaled(count: int, inner: int, columns: int) -> Problem:
    narrow = functools.partial(normal, dtype=jnp.float8_e4m3fn)

    def factor(*shape: int) -> Draw:
        return lambda key: jax.random.uniform(key, shape, jnp.float32, 0.5, 2.0)

    made = drawn(lhs=narrow(count, inner), rhs=narrow(inner, columns), lhs_scale=factor(count), rhs_scale=factor(columns))
    return Problem("scaled_matmul", f"{count}x{inner}x{columns}", made, {}, ("forward",), "few rows" if count <= 64 else "rows")


def float8(count: int, width: int, *, transposed: bool) -> Problem:
    name = f"{count}x{width}{' transposed' if transposed else ''}"
    options = {"transposed": True} if transposed else {}
    kind = "transposed" if transposed else "plain"
    return Problem("quantize_float8", name, drawn(x=normal(count, width)), options, ("forward",), kind)


def linear(count: int, inner: int, columns: int, form: str) -> Problem:
    """form: of "norm", "silu", "residual", or nothing."""
    made = {"x": normal(count, inner), "weight": normal(columns, inner, scale=inner**-0.5)}
    if "norm" in form:
        made["norm_scale"] = normal(inner)
    width = columns // 2 if "silu" in form else columns
    if "residual" in form:
        made["residual"] = normal(count, width)
    options = {"activation": "silu"} if "silu" in form else {}
    kind = "few rows" if count <= 64 else "rows"
    return Problem("fused_linear", f"{count}x{inner}x{columns} {form}", drawn(**made), options, ("forward",), kind)


def some_linear(generator: random.Random) -> tuple[Any, ...]:
    form = generator.choice(["", "norm", "norm silu", "residual"])
    return between(generator, 1, 1024), *(between(generator, 1024, 14336, 128) for _ in range(2)), form


def convolution(batch: int, length: int, channels: int, *, documents: bool = False) -> Problem:
    more = {"cu_seqlens": (5,)} if documents else {}
    name = f"B{batch} T{length} C{channels}{' packed' if documents else ''}"
    return rows(row_problems.convolution(batch, length, channels, **more), name)


def recurrence(family: str, shape: Shape) -> Problem:
    one = FAMILIES[family]
    step = shape.length == 1
    options = {**one.options, **({"return_state": True} if step and not one.function.startswith("state_space") else {})}
    kind = "step" if step else f"{'few' if shape.batch * shape.heads < 32 else 'many'} heads"
    return Problem(
        one.function, f"{family} {shape}", functools.partial(one.make, shape), options, ("forward",) if step else BOTH, kind
    )


def some_recurrence(generator: random.Random) -> tuple[str, Shape]:
    family = generator.choice(["gated", "kda", "rwkv7", "gla", "lightning", "mamba2", "mamba1", "mamba3", "rwkv6"])
    batch, heads = generator.choice([1, 2, 4]), generator.choice([4, 8, 16, 32])
    documents = generator.choice([0, 0, 5]) if batch == 1 else 0
    return family, Shape(batch, between(generator, 512, 16384 // batch, 64), heads, generator.choice([64, 128]), documents)


LAYERS = ("gated", "mamba2", "gla", "kda", "mamba1", "rwkv7", "lightning", "rwkv6", "rwkv4", "mamba3")
RECURRENCES = tuple(
    (family, shape)
    for shape in (Shape(1, 8192, 32, 128), Shape(1, 8192, 8, 128), Shape(4, 2048, 32, 64), Shape(1, 8192, 16, 128, 8))
    for family in LAYERS
    if not (family == "rwkv4" and shape.documents)
)
STEPS = tuple((family, Shape(batch, 1, 32, 128)) for batch in (1, 64, 16, 256) for family in LAYERS[:-1])


def some_step(generator: random.Random) -> tuple[str, Shape]:
    return generator.choice(LAYERS[:-1]), Shape(between(generator, 1, 256), 1, generator.choice([8, 16, 32, 64]), 64)


def expert(part: str, tokens: int, experts: int, k: int, width: int = 0, groups: int = 0) -> Problem:
    shape = moe.Shape(part, tokens, experts, k, width, groups)

    def make() -> dict[str, Any]:
        return moe.arguments_of(shape, iter(jax.random.split(jax.random.key(0), 4)))[0]

    few = iter(jax.random.split(jax.random.key(0), 4))
    options = moe.arguments_of(shape._replace(tokens=1, width=min(width, 8)), few)[1]
    name = f"T{tokens} E{experts} k{k}{f' D{width}' if width else ''}{f' of {groups} groups' if groups else ''}"
    moving = {"route": ("logits",), "permute": ("x",), "unpermute": ("rows", "weights")}[part]
    kind = "few tokens" if tokens < 512 else "tokens"
    return Problem(f"moe_{part}", name, make, options, BOTH, kind, moving)


def some_experts(generator: random.Random) -> tuple[Any, ...]:
    part = generator.choice(["route", "permute", "unpermute"])
    tokens, experts = between(generator, 1, 16384), generator.choice([8, 16, 32, 64, 128, 256])
    width = 0 if part == "route" else between(generator, 512, 7168, 64)
    return part, tokens, experts, generator.choice([1, 2, 4, 8]), width


EXPERTS = (
    *((part, 64, 64, 8, 2048) for part in ("permute", "unpermute")),
    ("route", 64, 64, 8),
    ("route", 16384, 64, 8),
    *((part, 16384, 64, 8, 2048) for part in ("permute", "unpermute")),
    ("route", 16384, 256, 8, 0, 8),
    *((part, 8192, 8, 2, 4096) for part in ("permute", "unpermute")),
    ("route", 1, 32, 4),
)


def pooling(batch: int, length: int, heads: int, width: int) -> Problem:
    return rows(row_problems.Problem("mean_pooling", {"x": (batch, length, heads, width)}))


def orthogonal(count: int, height: int, width: int, dtype: str) -> Problem:
    name = f"{count}x{height}x{width} {dtype}"
    made = drawn(x=normal(count, height, width, dtype=jnp.float32))
    return Problem("newton_schulz", name, made, {"dtype": dtype}, ("forward",), dtype)


def stored(requests: int, held: int, page: int, heads: int, size: int) -> Problem:
    """One new token of each request."""
    row = -(-held // page)
    cache = (requests * row, page, heads, size)
    made = drawn(
        keys=normal(requests, heads, size),
        values=normal(requests, heads, size),
        key_cache=normal(*cache),
        value_cache=normal(*cache),
        kv_lens=constant(np.full(requests, held, np.int32)),
        block_tables=constant(np.arange(requests * row, dtype=np.int32).reshape(requests, row)),
        query_start_loc=constant(np.arange(requests + 1, dtype=np.int32)),
    )
    return Problem(
        "paged_cache_update", f"{requests} x 1 of {held} H{heads} D{size} page {page}", made, {}, ("forward",), "step"
    )


def sparse(tokens: int, heads: tuple[int, int], size: int) -> Problem:
    rows = {
        name: normal(1, tokens, count, size) for name, count in zip(("query", "key", "value"), (*heads, heads[1]), strict=True)
    }
    gates = {name: (lambda key: jax.random.uniform(key, (1, tokens, heads[0]), jnp.bfloat16)) for name in ("g_cmp", "g_slc")}
    name = f"T{tokens} H{heads[0]}/{heads[1]} D{size}"
    return Problem("native_sparse_attention", name, drawn(**rows, **gates), {}, BOTH, "", ("query", "key", "value"))
