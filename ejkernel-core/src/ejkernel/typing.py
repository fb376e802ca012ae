"""Types of the public functions' arguments and results: named shapes, words, settings.

A shape names its axes: `Float[ArrayLike, "batch length heads size"]` is a floating array of four axes. Static checkers read the
array alone. Under `EJKERNEL_TYPECHECK=1` every call is checked at run time, dtypes, ranks, and that an axis has one size wherever
its name stands in the same signature. `*batch` is any number of axes, `#heads` an axis that may be 1 instead, `_` and `...` axes
of any size.

Nothing of ejkernel is imported here, so that every layer may use these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh as _Mesh, PartitionSpec
from jax.typing import DTypeLike as DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32, Integer, Key, Num, Shaped, UInt32

# Arrays and numbers

ArrayLike = jax.Array | np.ndarray
"""An array argument: of JAX, traced or not, or of NumPy."""

RecordArray = Any
"""An array in an operation's `Inputs` or `Outputs`: JAX's in a program, NumPy's in a test, an `ArraySpec` where it is described."""

Number = float | np.number | Shaped[ArrayLike, ""]
"""A real number that is known when the program is built."""

Count = int | np.integer | Integer[ArrayLike, ""]
"""An integer that is known when the program is built."""

Axis = Count | Sequence[Count]
"""An axis, or several."""

Flag = bool | np.bool | Bool[ArrayLike, ""]
"""True or False, known when the program is built."""

Scalar = float | np.number | Num[ArrayLike, ""] | Num[ArrayLike, "1"]
"""A number that may be traced."""

TracedCount = int | np.integer | Integer[ArrayLike, ""] | Integer[ArrayLike, "1"]
"""An integer that may be traced."""

Seed = int | np.integer | Integer[ArrayLike, "..."] | Key[ArrayLike, ""]
"""A seed: an int, an integer scalar, a raw key, or a PRNG key of `jax.random`."""

AnyShape = Shaped[ArrayLike, "..."]
"""An array of any dtype and shape."""

AnyFloat = Float[ArrayLike, "..."]
"""A floating array of any shape."""

# Settings

Platforms = str | Sequence[str] | None
"""Who may run a call: None or "auto", the name of one platform, or several in order of preference."""


@runtime_checkable
class DataclassConfig(Protocol):
    """An object whose class is a dataclass: the config of an implementation, or a portable one."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


ConfigLike = DataclassConfig | Mapping[str, Any]
"""Knobs of the chosen implementation: its dataclass, a mapping of some of its fields, or a portable config."""

Mesh = _Mesh | AbstractMesh
"""The devices over which a call is split."""

AxisNames = str | tuple[str, ...] | list[str]
"""A mesh axis, or several."""

InSpecs = Sequence[PartitionSpec | None]
"""One PartitionSpec, or None for whole, for each positional array."""

OutSpecs = PartitionSpec | Sequence[PartitionSpec]
"""The PartitionSpec of the result, or one for each of several results."""

Window = TracedCount | tuple[TracedCount | None, TracedCount | None] | list[TracedCount | None]
"""Keys around a query: `(left, right)`, inclusive, None = unlimited; an int says both sides, or counts the last keys."""

WindowPair = tuple[TracedCount | None, TracedCount | None] | list[TracedCount | None]
"""Keys around a query: `(left, right)`, inclusive, None = unlimited."""

PrecisionLike = jax.lax.Precision | Literal["default", "high", "highest", "DEFAULT", "HIGH", "HIGHEST"]
"""Precision of matrix products."""

# Words

CausalAlignment = Literal["top_left", "bottom_right"]
"""Where the first query stands among the keys."""

PackedLayout = Literal["thd", "htd", "bthd", "bhtd"]
"""Axes of packed arrays: t tokens, h heads, d channels, b of size 1."""

CacheLayout = Literal["pthd", "phtd", "hptd"]
"""Axes of a paged cache: p pages, t tokens of a page, h heads, d channels."""

DotProductImplementation = Literal["xla", "cudnn"]
"""The words of `jax.nn.dot_product_attention` for who runs it."""

RotaryLayout = Literal["BTHD", "BHTD"]
"""Axes of queries and keys: B batch, T length, H heads, D channels."""

SequenceLayout = Literal["contiguous", "zigzag"]
"""Order of a sequence that is split over devices."""

SequenceStrategy = Literal["ring", "all_to_all"]
"""What attention over a split sequence exchanges: keys and values round a ring, or heads for tokens."""

LayerSlopes = Literal["linear", "minimax", "bailing"]
"""Whose decays of lightning attention: flash-linear-attention's, MiniMax's, or those of Ling 2.5 and Ring 2.5."""

Reduction = Literal["none", "sum", "mean"]
"""What becomes of the losses of all tokens."""

Divergence = Literal["forward", "reverse", "jsd"]
"""Direction of a Kullback-Leibler divergence, or the generalised Jensen-Shannon divergence."""

QuantizationMode = Literal["affine", "nf4", "mxfp4", "mxfp8", "nvfp4", "nvfp8"]
"""Format of quantised weights."""

TpuPath = Literal["hybrid", "packed", "predecode"]
"""A hint for TPU kernels of quantised products."""

# Attention: queries [B, T, H, D] or [T, H, D]

Queries = Float[ArrayLike, "*batch queries heads size"]
Keys = Float[ArrayLike, "*batch keys kv_heads size"]
Values = Float[ArrayLike, "*batch keys kv_heads value_size"]
Attended = Float[Array, "*batch queries heads value_size"]
LogSumExp = Float32[Array, "*batch queries heads"] | Float64[Array, "*batch queries heads"]
Bias = Float[ArrayLike, "#rows #heads #queries #keys"] | Float[ArrayLike, "#queries #keys"]
RingBias = Float[ArrayLike, "#rows #heads #queries #all_keys"] | Float[ArrayLike, "#queries #all_keys"]
"""A shard of a ring has its own queries' rows and all keys."""
DotProductBias = Bias | Float[ArrayLike, "#heads #queries #keys"]
DotProductMask = Bool[ArrayLike, "..."] | Num[ArrayLike, "..."]
"""Of booleans, or of 0 and 1 as Flax makes them; Flax's have any number of axes for rows."""
Sinks = Float[ArrayLike, "heads"] | Float[ArrayLike, "#heads sinks"]
ScoreMod = Callable[..., Any]
"""Of (score, batch, head, query index, key index) and, where there are any, mod_inputs; returns a score."""
MaskMod = Callable[..., Any]
"""Of (batch, head, query index, key index) and, where there are any, mod_inputs; returns a bool."""
ModInputs = Any
"""A pytree of arrays."""
AlibiSlopes = Float[ArrayLike, "heads"] | Float[ArrayLike, "#rows heads"]
ForgetGate = Float[ArrayLike, "#rows heads keys"]
Weights = Float[Array, "*batch heads queries keys"]
CumulativeLengths = Integer[ArrayLike, "boundaries"]
Lengths = Integer[ArrayLike, "sequences"]
RowLengths = Integer[ArrayLike, "batch"]

# Packed attention: the layout says where tokens and heads stand

PackedHeads = Float[ArrayLike, "... _ _ size"]
PackedValues = Float[ArrayLike, "... _ _ value_size"]
PackedAttended = Float[Array, "... _ _ value_size"]
PackedLogSumExp = Float32[Array, "..."] | Float64[Array, "..."]
PackedBias = Float[ArrayLike, "_ _ _ _"] | Float[ArrayLike, "_ _"]
PackedSinks = Float[ArrayLike, "_"] | Float[ArrayLike, "_ sinks"]

# Attention with heads before tokens: [B, H, T, D]

HeadQueries = Float[ArrayLike, "batch heads queries size"]
HeadKeys = Float[ArrayLike, "batch kv_heads keys size"]
HeadValues = Float[ArrayLike, "batch kv_heads keys value_size"]
HeadAttended = Float[Array, "batch heads queries value_size"]
TileMap = Bool[ArrayLike, "*rows query_tiles key_tiles"]

# Attention over keys that each query chooses

Gates = Float[ArrayLike, "batch queries heads"]
BlockIndices = Integer[ArrayLike, "batch queries kv_heads chosen"]
BlockCounts = Count | Integer[ArrayLike, "batch queries kv_heads"]

# Latent attention

LatentQueries = Float[ArrayLike, "batch queries heads _"]
Latents = Float[ArrayLike, "batch keys rank"]
KeyProjection = Float[ArrayLike, "rank kv_heads size"]
ValueProjection = Float[ArrayLike, "rank kv_heads value_size"]
RotaryQueries = Float[ArrayLike, "batch queries *heads rotary"]
RotaryKeys = Float[ArrayLike, "batch keys rotary"]
LatentAttended = Float[Array, "batch queries heads value_size"]
IndexQueries = Float[ArrayLike, "batch queries index_heads index_size"]
IndexKeys = Float[ArrayLike, "batch keys index_size"]
IndexWeights = Float[ArrayLike, "batch queries index_heads"]
IndexKeyScales = Float[ArrayLike, "batch keys"]

# Attention over caches, for serving

TokenQueries = Float[ArrayLike, "tokens heads size"]
NewKeys = Num[ArrayLike, "tokens kv_heads size"]
NewValues = Num[ArrayLike, "tokens kv_heads value_size"]
TokenAttended = Float[Array, "tokens heads value_size"]
TokenLogSumExp = Float32[Array, "tokens heads"]
KeyPages = Num[ArrayLike, "_ _ _ size"]
ValuePages = Num[ArrayLike, "_ _ _ value_size"]
InterleavedPages = Num[ArrayLike, "pages page_size _ size"]
PackedPages = Num[ArrayLike, "pages page_size groups packing channels"]
LatentPages = Num[ArrayLike, "pages groups packing channels"]
KeySlots = Num[ArrayLike, "slots kv_heads size"]
ValueSlots = Num[ArrayLike, "slots kv_heads value_size"]
ContextLengths = Integer[ArrayLike, "requests"]
BlockTables = Integer[ArrayLike, "requests entries"]
FlatBlockTables = Integer[ArrayLike, "entries"]
QueryStarts = Integer[ArrayLike, "boundaries"]
Distribution = Integer[ArrayLike, "3"]
Slopes = Float[ArrayLike, "heads"]
TreeBias = Float[ArrayLike, "*requests new new"]
SameTokenOutput = Float[Array, "tokens heads size"]
NewKeyPages = Num[Array, "_ _ _ size"]
NewValuePages = Num[Array, "_ _ _ value_size"]
NewPackedPages = Num[Array, "pages page_size groups packing channels"]
RequestCount = Count | Integer[ArrayLike, "1"]
DecodeQueries = Float[ArrayLike, "batch *one heads size"]
DecodeAttended = Float[Array, "batch *one heads value_size"]
CacheKeys = Num[ArrayLike, "batch keys kv_heads size"]
CacheValues = Num[ArrayLike, "batch keys kv_heads value_size"]
LatentTokenQueries = Float[ArrayLike, "tokens heads rank"]
RotaryTokenQueries = Float[ArrayLike, "tokens heads rotary"]
NewLatents = Num[ArrayLike, "tokens rank"]
NewRotaryKeys = Num[ArrayLike, "tokens rotary"]
LatentTokenAttended = Float[Array, "tokens heads rank"]
NewLatentPages = Num[Array, "pages groups packing channels"]
CacheScale = Scalar | Num[ArrayLike, "_"]
"""Factor of what a cache stores: a number, a scalar array, or one per key head."""
StoredScale = CacheScale | Num[ArrayLike, "_ _"] | Num[ArrayLike, "_ _ _"]
"""The same, or one for each stored row and key head."""
ScalePages = Float[ArrayLike, "_ _ kv_heads"]
NewScalePages = Float[Array, "_ _ kv_heads"]

# Recurrences over a sequence; heads may be shared in either direction

SequenceHeads = Float[ArrayLike, "batch length _ size"]
SequenceValues = Float[ArrayLike, "batch length _ value_size"]
StepHeads = Float[ArrayLike, "batch steps _ size"]
StepValues = Float[ArrayLike, "batch steps _ value_size"]
StepPerHead = Float[ArrayLike, "batch steps _"]
PerHead = Float[ArrayLike, "batch length _"]
PerHeadOrChannel = Float[ArrayLike, "batch length _"] | Float[ArrayLike, "batch length _ size"]
ConstantDecay = Float[ArrayLike, "_"] | Float[ArrayLike, "#batch _"]
Bonus = Float[ArrayLike, "_ size"]
MatrixState = Float[ArrayLike, "sequences state_heads size value_size"]
FinalState = Float32[Array, "sequences state_heads size value_size"] | Float64[Array, "sequences state_heads size value_size"]
KeySums = Float[ArrayLike, "sequences state_heads size"]
HeadMaxima = Float[ArrayLike, "sequences state_heads"]
MatrixMemory = tuple[MatrixState, KeySums, HeadMaxima]
NewMatrixMemory = tuple[FinalState, KeySums, HeadMaxima]
ForgetActivation = Literal["sigmoid", "exp"]
SequenceOutput = Float[Array, "batch length _ value_size"]
SegmentIds = Integer[ArrayLike, "#batch length"]

TokenHeads = Float[ArrayLike, "tokens _ size"]
TokenValues = Float[ArrayLike, "tokens _ value_size"]
TokenPerHead = Float[ArrayLike, "tokens _"]
TokenPerHeadOrChannel = Float[ArrayLike, "tokens _"] | Float[ArrayLike, "tokens _ size"]
TokenOutput = Float[Array, "tokens _ value_size"]
StatePool = Float[ArrayLike, "slots state_heads size value_size"]
NewStatePool = Float[Array, "slots state_heads size value_size"]
StateIndices = Integer[ArrayLike, "requests"]

# State-space models and RWKV-4

Channels = Float[ArrayLike, "channels"]
SequenceChannels = Float[ArrayLike, "batch length channels"]
SequenceChannelsOutput = Float[Array, "batch length channels"]
ScanMatrix = Float[ArrayLike, "channels states"]
ScanInputs = Float[ArrayLike, "batch length states"]
ScanState = Float[ArrayLike, "sequences channels states"]
NewScanState = Float32[Array, "sequences channels states"] | Float64[Array, "sequences channels states"]
ConvFilters = Float[ArrayLike, "channels width"]
ConvState = Float[ArrayLike, "sequences before channels"]
NewConvState = Float[Array, "sequences before channels"]
HeadChannels = Float[ArrayLike, "batch length heads channels"]
Heads = Float[ArrayLike, "heads"]
SequencePerHead = Float[ArrayLike, "batch length heads"]
GroupInputs = Float[ArrayLike, "batch length groups states"]
HeadGate = Float[ArrayLike, "batch length inner"]
HeadSkip = Float[ArrayLike, "heads"] | Float[ArrayLike, "heads channels"]
InnerScale = Float[ArrayLike, "inner"]
HeadState = Float[ArrayLike, "sequences heads channels states"]
NewHeadState = Float32[Array, "sequences heads channels states"] | Float64[Array, "sequences heads channels states"]
HeadOutput = Float[Array, "batch length inner"]
HeadChannelsOutput = Float[Array, "batch length heads channels"]
HeadRates = Float[ArrayLike, "heads"] | Float[ArrayLike, "batch length heads"]
PairAngles = Float[ArrayLike, "batch length _ pairs"]
HeadInputBias = Float[ArrayLike, "heads states"]
HeadAngles = Float[ArrayLike, "sequences heads pairs"]
TurningState = Float[ArrayLike, "sequences heads states channels"]
LastInputs = Float[ArrayLike, "sequences heads states"]
LastChannels = Float[ArrayLike, "sequences heads channels"]
TrapezoidalState = tuple[HeadAngles, TurningState, LastInputs, LastChannels]
NewHeadAngles = Float32[Array, "sequences heads pairs"] | Float64[Array, "sequences heads pairs"]
NewTurningState = Float32[Array, "sequences heads states channels"] | Float64[Array, "sequences heads states channels"]
NewLastInputs = Float32[Array, "sequences heads states"] | Float64[Array, "sequences heads states"]
NewLastChannels = Float32[Array, "sequences heads channels"] | Float64[Array, "sequences heads channels"]
NewTrapezoidalState = tuple[NewHeadAngles, NewTurningState, NewLastInputs, NewLastChannels]
MixingState = Float[ArrayLike, "batch 3 channels"]
NewMixingState = Float32[Array, "batch 3 channels"] | Float64[Array, "batch 3 channels"]

# Rows

GateRows = Float[ArrayLike, "*rows channels"]
GatedRows = Float[Array, "*rows _"]
GateActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid"]
"""Activation of a gated linear unit."""
WholeSequence = Shaped[ArrayLike, "*shape"]
ReorderedSequence = Shaped[Array, "*shape"]
Rows = Float[ArrayLike, "*shape"]
RowsOutput = Float[Array, "*shape"]
RowScale = Float[ArrayLike, "features"] | Float[ArrayLike, "*several"]
Where = Bool[ArrayLike, "..."]
TokenMask = Shaped[ArrayLike, "batch length"]
Pooled = Float[ArrayLike, "rows *features"]
PooledOutput = Float[Array, "sequences *pooled"]

RotaryHeads = Float[ArrayLike, "*batch _ _ size"]
RotaryOutput = Float[Array, "*batch _ _ size"]
Angles = Float[ArrayLike, "... length width"]
HeadScale = Float[ArrayLike, "size"]
Positions = Integer[ArrayLike, "*positions"]
PositionAngles = Float32[Array, "*positions width"]

# Matrix products

LhsRows = Float[ArrayLike, "rows inner"]
BatchedRows = Float[ArrayLike, "*rows inner"]
LinearWeight = Float[ArrayLike, "outputs inner"]
LinearBias = Float[ArrayLike, "outputs"]
ResidualRows = Float[ArrayLike, "*rows columns"]
Matrices = Float[ArrayLike, "*batch rows columns"]
MatricesOutput = Float[Array, "*batch rows columns"]
Coefficients = Sequence[Number] | Sequence[Sequence[Number]]
BatchedProduct = Float[Array, "*rows columns"]
GroupMatrices = Num[ArrayLike, "groups _ _"]
GroupSizes = Integer[ArrayLike, "sizes"]
GroupOffset = Count | Integer[ArrayLike, "1"]
ResultRows = Float[ArrayLike, "rows columns"]
ProductRows = Float[Array, "rows columns"]
GroupScale = Num[ArrayLike, "groups"] | Num[ArrayLike, "groups columns"]
GroupBias = Num[ArrayLike, "groups columns"]
RowFactor = Scalar | Num[ArrayLike, "rows"]
QuantizedWeights = UInt32[ArrayLike, "*matrices weight_rows words"]
QuantizationScales = Num[ArrayLike, "*matrices weight_rows scale_groups"]
NarrowRows = Num[ArrayLike, "*rows inner"]
NarrowMatrix = Num[ArrayLike, "_ _"]
ScaleOfRows = Scalar | Float[ArrayLike, "*rows"]
ScaleOfColumns = Scalar | Float[ArrayLike, "columns"]
ShardedRows = Float[ArrayLike, "... _ _"]
ShardedMatrix = Float[ArrayLike, "_ _"]
ShardedProduct = Float[Array, "... _ _"]

# Mixtures of experts

RouterLogits = Float[ArrayLike, "tokens experts"]
ExpertBias = Float[ArrayLike, "experts"]
RouteWeights = Float32[Array, "tokens choices"] | Float64[Array, "tokens choices"]
ChosenExperts = Integer[Array, "tokens choices"]
ChoicesGiven = Integer[ArrayLike, "tokens choices"]
ChoiceWeights = Float[ArrayLike, "tokens choices"]
TokenRows = Float[ArrayLike, "tokens width"]
TokenRowsOutput = Float[Array, "tokens width"]
TokenWhere = Bool[ArrayLike, "tokens"]
SortedRows = Float[Array, "copies width"]
RowsOfExperts = Float[ArrayLike, "copies width"]
ExpertCounts = Integer[Array, "experts"]

# Losses

Logits = Float[ArrayLike, "*tokens vocabulary"]
Targets = Integer[ArrayLike, "*tokens"]
SoftTargets = Float[ArrayLike, "*tokens vocabulary"]
TokenWeights = Shaped[ArrayLike, "*tokens"]
Hidden = Float[ArrayLike, "*tokens width"]
Head = Float[ArrayLike, "_ _"]
HeadBias = Float[ArrayLike, "_"]
TeacherHidden = Float[ArrayLike, "*tokens teacher_width"]
Loss = Float32[Array, "..."] | Float64[Array, "..."]
TokenLogprobs = Float32[Array, "*tokens"] | Float64[Array, "*tokens"]

# Sampling

TokenKeys = Key[ArrayLike, "*keys"] | UInt32[ArrayLike, "*keys _"]
PerToken = Scalar | Num[ArrayLike, "*tokens"]
CountPerToken = TracedCount | Integer[ArrayLike, "*tokens"]
SampledTokens = Int32[Array, "*tokens"]
SampledLogprobs = Float32[Array, "*tokens"]
