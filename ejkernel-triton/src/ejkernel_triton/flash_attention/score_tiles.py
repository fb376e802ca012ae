"""Score functions inside the kernels: the programs of `score_params`, unrolled at compile time."""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportCallIssue=false
# ruff: noqa: RUF005, SIM102, SIM108 - static and dynamic conditions stay apart, and Triton unpacks no tuples
import triton
import triton.language as tl


@triton.jit
def as_dtype(x, DTYPE: tl.constexpr):
    """Halves are rounded, and held and computed with in float32."""
    if DTYPE == "float32":
        y = x.to(tl.float32)
    if DTYPE == "float16":
        y = x.to(tl.float32).to(tl.float16).to(tl.float32)
    if DTYPE == "bfloat16":
        y = x.to(tl.float32).to(tl.bfloat16).to(tl.float32)
    if DTYPE == "int32":
        y = x.to(tl.int32)
    if DTYPE == "bool":
        y = x != 0
    return y


@triton.jit
def number(VALUE: tl.constexpr, DTYPE: tl.constexpr):
    if DTYPE == "bool":
        x = tl.full((), VALUE, tl.int1)
    if DTYPE == "int32":
        x = tl.full((), VALUE, tl.int32)
    if DTYPE != "bool":
        if DTYPE != "int32":
            if VALUE == "nan":
                x = as_dtype(tl.full((), float("nan"), tl.float32), DTYPE)
            else:
                x = as_dtype(tl.full((), VALUE, tl.float32), DTYPE)
    return x


@triton.constexpr_function
def program_of(R, which):
    """The program of a derivative by its place among those of the loads, or one by its name: "result" and "slope" of the score
    function, "mask", and "one", the number 1."""
    if isinstance(which, int):
        return R.score.load_slopes[which]
    return {"one": R.one, "mask": R.mask_program}[which] if which in ("one", "mask") else getattr(R.score, which)


@triton.constexpr_function
def steps_of(R, which):
    return len(program_of(R, which)[0])


@triton.constexpr_function
def result_of(R, which):
    return program_of(R, which)[1]


@triton.constexpr_function
def part_of(R, which, step, part):
    """A part of an instruction, none of which is a tuple."""
    return program_of(R, which)[0][step][part]


@triton.constexpr_function
def parts_of(R, which, step):
    return len(program_of(R, which)[0][step])


@triton.constexpr_function
def indices_of(R, which, step):
    return len(program_of(R, which)[0][step][3])


@triton.constexpr_function
def index_of(R, which, step, index, part):
    return program_of(R, which)[0][step][3][index][part]


@triton.jit
def element(known, p_values, p_integers, R: tl.constexpr, WHICH: tl.constexpr, STEP: tl.constexpr):
    """One number of an array for every entry of a tile, an index beyond its axis brought to the nearest, as JAX does."""
    o = tl.full((), part_of(R, WHICH, STEP, 2), tl.int32)
    for i in tl.static_range(indices_of(R, WHICH, STEP)):
        b_index = tl.maximum(known[index_of(R, WHICH, STEP, i, 0)], 0)
        o += tl.minimum(b_index, index_of(R, WHICH, STEP, i, 2)) * index_of(R, WHICH, STEP, i, 1)
    if part_of(R, WHICH, STEP, 1) == "values":
        x = tl.load(p_values + o)
    else:
        x = tl.load(p_integers + o)
    return x


@triton.jit
def of_one(x, NAME: tl.constexpr):
    if NAME == "abs":
        y = tl.abs(x)
    if NAME == "ceil":
        y = tl.ceil(x)
    if NAME == "cos":
        y = tl.cos(x)
    if NAME == "erf":
        y = tl.erf(x)
    if NAME == "exp":
        y = tl.exp(x)
    if NAME == "exp2":
        y = tl.exp2(x)
    if NAME == "expm1":
        b_power = tl.exp(x)
        y = tl.where(tl.abs(x) < 0.1, x * (1.0 + x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120))))), b_power - 1.0)
    if NAME == "floor":
        y = tl.floor(x)
    if NAME == "is_finite":
        y = x - x == 0
    if NAME == "log":
        y = tl.log(x)
    if NAME == "log1p":
        b_sum = 1.0 + x
        y = tl.where(b_sum == 1.0, x, tl.log(b_sum) * x / tl.where(b_sum == 1.0, 1.0, b_sum - 1.0))
        y = tl.where(x == float("inf"), x, y)
    if NAME == "logistic":
        y = 1.0 / (1.0 + tl.exp(-x))
    if NAME == "neg":
        y = -x
    if NAME == "not":
        y = x == 0
    if NAME == "one_minus_square":
        y = (1.0 - x) * (1.0 + x)
    if NAME == "rsqrt":
        y = 1.0 / tl.sqrt(x)
    if NAME == "sign":
        y = tl.where(x > 0, x * 0 + 1, tl.where(x < 0, x * 0 - 1, x))
    if NAME == "sin":
        y = tl.sin(x)
    if NAME == "sqrt":
        y = tl.sqrt(x)
    if NAME == "square":
        y = x * x
    if NAME == "tanh":
        y = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return y


@triton.jit
def of_two(x, y, NAME: tl.constexpr):
    if NAME == "add":
        z = x + y
    if NAME == "and":
        z = x & y
    if NAME == "div":
        if x.dtype.is_floating():
            z = x / y
        else:
            z = x // y  # rounds toward zero, as JAX's does
    if NAME == "eq":
        z = x == y
    if NAME == "ge":
        z = x >= y
    if NAME == "gt":
        z = x > y
    if NAME == "le":
        z = x <= y
    if NAME == "lt":
        z = x < y
    if NAME == "max":
        z = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    if NAME == "min":
        z = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    if NAME == "mul":
        z = x * y
    if NAME == "ne":
        z = x != y
    if NAME == "or":
        z = x | y
    if NAME == "rem":
        z = x % y
    if NAME == "sub":
        z = x - y
    if NAME == "xor":
        z = x ^ y
    return z


@triton.jit
def computed(known, p_values, p_integers, R: tl.constexpr, WHICH: tl.constexpr, STEP: tl.constexpr):
    """The result of one instruction; `known` are the results before it."""
    NAME: tl.constexpr = part_of(R, WHICH, STEP, 0)
    if NAME == "number":
        x = number(part_of(R, WHICH, STEP, 1), part_of(R, WHICH, STEP, 2))
    elif NAME == "load":
        x = element(known, p_values, p_integers, R, WHICH, STEP)
    else:
        x = known[part_of(R, WHICH, STEP, 1)]
        if NAME == "convert":
            x = as_dtype(x, part_of(R, WHICH, STEP, 2))
        elif NAME == "integer_pow":
            b_base = x
            x = b_base * 0 + 1
            for _ in tl.static_range(part_of(R, WHICH, STEP, 2)):
                x = x * b_base
        elif NAME == "select_n":
            x = tl.where(x, known[part_of(R, WHICH, STEP, 3)], known[part_of(R, WHICH, STEP, 2)])
        elif NAME == "clamp":
            x = tl.minimum(tl.maximum(known[part_of(R, WHICH, STEP, 2)], x), known[part_of(R, WHICH, STEP, 3)])
        elif parts_of(R, WHICH, STEP) == 2:
            x = of_one(x, NAME)
        else:
            x = of_two(x, known[part_of(R, WHICH, STEP, 2)], NAME)
    return x


@triton.jit
def evaluated(p_masks, b_score, o_query, o_key, R: tl.constexpr, WHICH: tl.constexpr):
    """The result of a program for every entry of a tile. `p_masks[7:]` are the vectors of numbers, and batch and head as told."""
    known = (b_score, p_masks[9], p_masks[10], o_query, o_key)
    for i in tl.static_range(steps_of(R, WHICH)):
        known = known + (computed(known, p_masks[7], p_masks[8], R, WHICH, i),)
    return known[result_of(R, WHICH)]
