"""Tiles of packed weights, unpacked in registers.

The codes of a row repeat their places in words after a period: `PERIOD` codes in `WORDS` words. A tile is `[rows, periods]` words,
and its codes of one place are a matrix of the same shape. So a thread reads a word once, unpacks each of its codes by shifts that
are known when the kernel is compiled, and has them as operands of its own MMAs: codes are not exchanged between threads.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false
import triton
import triton.language as tl

from ejkernel.quantization.codes import NF4

NF4_VALUES = tl.constexpr(tuple(float(value) for value in NF4))
RAISE = tl.constexpr(
    tuple(f"lop3.b32 $0, $1, {((1 << bits) - 1) << (23 - bits)}, {(127 + bits) << 23}, 0xEA;" for bits in range(9))
)
"""By bits, one instruction for `code & mask | exponent`: from Triton's two operations ptxas makes two."""
E4M3 = tl.constexpr(
    "{.reg .b16 a, low, high; .reg .b32 both; cvt.u16.u32 a, $1; cvt.rn.f16x2.e4m3x2 both, a; mov.b32 {low, high}, both; "
    "cvt.f32.f16 $0, low;}"
)
"""float32 of the E4M3 code in the low byte, from compute capability 8.9 on."""


@triton.jit
def load_words(p_words, o_r, o_p, m_r, ROW_WORDS: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr):
    """WORDS matrices `[R, P]`: the words of periods o_p `[P]` in rows o_r `[R]`; 0 where a row ends."""
    b_words = ()
    for i_word in tl.static_range(WORDS):
        o_word = o_p * WORDS + i_word
        p_tile = p_words + o_r[:, None] * ROW_WORDS + o_word[None, :]
        if MASKED:
            b_words += (tl.load(p_tile, mask=m_r[:, None] & (o_word < ROW_WORDS)[None, :], other=0),)
        else:
            b_words += (tl.load(p_tile),)
    return b_words


@triton.jit
def code_at(b_words, PLACE: tl.constexpr, BITS: tl.constexpr, TO: tl.constexpr):
    """The codes of a place, shifted to bit TO, with other bits around them unless they come from two words."""
    WORD: tl.constexpr = PLACE * BITS // 32
    AT: tl.constexpr = PLACE * BITS % 32
    b_word = b_words[WORD]
    if AT + BITS > 32:
        b_codes = (b_word >> AT) | (b_words[WORD + 1] << (32 - AT))
        return b_codes << TO
    if AT < TO:
        return b_word << (TO - AT)
    if AT > TO:
        return b_word >> (AT - TO)
    return b_word


@triton.jit
def small_float(b_sign, b_magnitude, SCALE: tl.constexpr):
    """float32 of bits 0x8000 of b_sign and of a float16 without sign in b_magnitude, which may be subnormal, times SCALE."""
    b_half = ((b_sign & 0x8000) | b_magnitude).to(tl.uint16).to(tl.float16, bitcast=True)
    return b_half.to(tl.float32) * SCALE


@triton.jit
def e4m3_value(b_code):
    """float32 of E4M3 codes in the low 8 bits; others are ignored. float16 has one more bit of exponent, of another bias."""
    b_value = small_float(b_code << 8, (b_code << 7) & 0x3F80, 256.0)
    return tl.where((b_code & 0x7F) == 0x7F, float("nan"), b_value)


@triton.jit
def e8m0_value(b_code):
    """Powers of two; 2**-127 is a subnormal number, 255 NaN."""
    b_bits = tl.where(b_code == 0, 0x400000, b_code << 23)
    return tl.where(b_code == 255, float("nan"), b_bits.to(tl.float32, bitcast=True))


@triton.jit
def nf4_value(b_code):
    """A tree of selections by the low bits of the code."""
    m_0, m_1, m_2, m_3 = (b_code & 1) != 0, (b_code & 2) != 0, (b_code & 4) != 0, (b_code & 8) != 0
    b_01 = tl.where(m_0, NF4_VALUES[1], NF4_VALUES[0])
    b_23 = tl.where(m_0, NF4_VALUES[3], NF4_VALUES[2])
    b_45 = tl.where(m_0, NF4_VALUES[5], NF4_VALUES[4])
    b_67 = tl.where(m_0, NF4_VALUES[7], NF4_VALUES[6])
    b_89 = tl.where(m_0, NF4_VALUES[9], NF4_VALUES[8])
    b_ab = tl.where(m_0, NF4_VALUES[11], NF4_VALUES[10])
    b_cd = tl.where(m_0, NF4_VALUES[13], NF4_VALUES[12])
    b_ef = tl.where(m_0, NF4_VALUES[15], NF4_VALUES[14])
    b_low = tl.where(m_2, tl.where(m_1, b_67, b_45), tl.where(m_1, b_23, b_01))
    b_high = tl.where(m_2, tl.where(m_1, b_ef, b_cd), tl.where(m_1, b_ab, b_89))
    return tl.where(m_3, b_high, b_low)


@triton.jit
def nf4_value_of_16_bits(b_raised):
    """The values of `16 + code`, with a relative error of 2e-4, a tenth of what bfloat16 may round off.

    They are quantiles of the normal distribution at even distances, 8 above 0 and 7 below: one odd function g of
    `(code - 7) / 8` or `/ 7`. Its coefficients minimise the largest relative error.
    """
    b_step = b_raised - 23.0
    b_u = tl.minimum(b_step * (1 / 8), b_step * (1 / 7))
    b_square = b_u * b_u
    b_g = b_square * 0.55680946 - 0.85993058
    b_g = b_g * b_square + 0.57610849
    b_g = b_g * b_square - 0.06539457
    b_g = b_g * b_square + 0.15815701
    b_g = b_g * b_square + 0.6340708
    return b_u * b_g


@triton.jit
def load_scales(
    p_scales,
    o_r,
    i_p,
    m_r,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PERIOD: tl.constexpr,
    PERIODS: tl.constexpr,
    PLACE: tl.constexpr,
    MODE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """float32 scales (or zero points) of the weights of a place, in `[R, PERIODS]` from period i_p on; 0 outside of the matrix."""
    GROUPS: tl.constexpr = COLUMNS // GROUP
    WHOLE: tl.constexpr = GROUP % PERIOD == 0 and (PERIODS * PERIOD) % GROUP == 0
    if WHOLE:
        o_group = i_p // (GROUP // PERIOD) + tl.arange(0, PERIODS * PERIOD // GROUP)
        m_group = o_group < GROUPS
    else:
        o_column = (i_p + tl.arange(0, PERIODS)) * PERIOD + PLACE
        o_group = o_column // GROUP
        m_group = o_column < COLUMNS
    p_tile = p_scales + o_r[:, None] * GROUPS + o_group[None, :]
    if MASKED:
        m_tile = m_r[:, None] & m_group[None, :]
        b_scale = tl.load(p_tile, mask=m_tile, other=0)
    else:
        b_scale = tl.load(p_tile)
    if MODE == "mxfp4" or MODE == "mxfp8":
        b_scale = e8m0_value(b_scale.to(tl.uint32))
        if MASKED:
            b_scale = tl.where(m_tile, b_scale, 0.0)
    elif MODE == "nvfp4" or MODE == "nvfp8":
        b_scale = e4m3_value(b_scale.to(tl.uint32))
    else:
        b_scale = b_scale.to(tl.float32)
    return b_scale


@triton.jit
def spread(b_scale, PERIODS: tl.constexpr):
    """`[R, groups]` -> `[R, PERIODS]`."""
    R: tl.constexpr = b_scale.shape[0]
    GROUPS: tl.constexpr = b_scale.shape[1]
    if GROUPS == PERIODS:
        return b_scale
    return tl.reshape(tl.broadcast_to(b_scale[:, :, None], [R, GROUPS, PERIODS // GROUPS]), [R, PERIODS])


@triton.jit
def weights_at(
    b_words,
    b_factor,
    b_shift,
    PLACE: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Weights `[R, P]` of a place in DTYPE, formed in float32 and rounded.

    An affine one is `factor * (2**BITS + code) + shift`, one FMA, whose first operand is made of bits. float32 results are
    `factor * (code - shift)` instead.

    ASM is 0 in the interpreter, which knows no PTX and, on some hosts, no subnormal numbers; 1 on a GPU; 2 on one that converts
    E4M3.
    """
    if MODE == "affine" or (MODE == "nf4" and DTYPE.is_bf16()):
        b_codes = code_at(b_words, PLACE, BITS, 23 - BITS)
        if ASM:
            b_raised = tl.inline_asm_elementwise(RAISE[BITS], "=r,r", [b_codes], dtype=tl.float32, is_pure=True, pack=1)
        else:
            b_codes = (b_codes & (((1 << BITS) - 1) << (23 - BITS))) | ((127 + BITS) << 23)
            b_raised = b_codes.to(tl.float32, bitcast=True)
        if MODE == "nf4":
            return (nf4_value_of_16_bits(b_raised) * b_factor).to(DTYPE)
        if DTYPE.primitive_bitwidth == 32:
            return ((b_raised - (1 << BITS)) - b_shift) * b_factor
        return (b_raised * b_factor + b_shift).to(DTYPE)
    if MODE == "nf4":
        return (nf4_value(code_at(b_words, PLACE, BITS, 0)) * b_factor).to(DTYPE)
    if BITS == 4 and ASM:
        b_bits = (code_at(b_words, PLACE, BITS, 28) & 0x80000000) | (code_at(b_words, PLACE, BITS, 22) & 0x01C00000)
        b_value = b_bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126: half of them are subnormal
    elif BITS == 4:
        b_value = small_float(code_at(b_words, PLACE, BITS, 12), code_at(b_words, PLACE, BITS, 9) & 0x0E00, 16384.0)
    elif ASM > 1:
        b_codes = code_at(b_words, PLACE, BITS, 0)
        b_value = tl.inline_asm_elementwise(E4M3, "=r,r", [b_codes], dtype=tl.float32, is_pure=True, pack=1)
    else:
        b_value = e4m3_value(code_at(b_words, PLACE, BITS, 0))
    return (b_value * b_factor).to(DTYPE)


@triton.jit
def load_factors(
    p_scales,
    p_zeros,
    o_r,
    i_p,
    m_r,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PERIOD: tl.constexpr,
    PERIODS: tl.constexpr,
    PLACE: tl.constexpr,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What `weights_at` needs of a place: factor and shift `[R, PERIODS]`."""
    b_factor = load_scales(p_scales, o_r, i_p, m_r, COLUMNS, GROUP, PERIOD, PERIODS, PLACE, MODE, MASKED)
    b_shift = b_factor
    if MODE == "affine":
        b_shift = load_scales(p_zeros, o_r, i_p, m_r, COLUMNS, GROUP, PERIOD, PERIODS, PLACE, MODE, MASKED)
        if DTYPE.primitive_bitwidth < 32:
            b_shift = (-(1 << BITS) - b_shift) * b_factor
    return spread(b_factor, PERIODS), spread(b_shift, PERIODS)


@triton.jit
def _join_halves(b_places):
    b_half = ()
    for i_half in tl.static_range(len(b_places) // 2):
        b_half += (tl.join(b_places[i_half], b_places[i_half + len(b_places) // 2]),)
    return b_half


@triton.jit
def joined(b_places):
    """Matrices `[R, P]` of 4 to 32 places -> `[R, P * places]` in the order of memory."""
    b_all = _join_halves(_join_halves(b_places))
    if len(b_all) > 1:
        b_all = _join_halves(b_all)
    if len(b_all) > 1:
        b_all = _join_halves(b_all)
    if len(b_all) > 1:
        b_all = _join_halves(b_all)
    return tl.reshape(b_all[0], [b_places[0].shape[0], b_places[0].shape[1] * len(b_places)])
