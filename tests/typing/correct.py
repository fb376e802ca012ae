"""A user's calls, all of them right: pyright and mypy have nothing to say of this file. It is read, never run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import ejkernel
from ejkernel import FlashAttention, MaskInfo, RmsNorm, create_default_executor, flash_attention, kernel_registry
from ejkernel.modules import FlashAttentionConfig

query: jax.Array = jnp.ones((2, 16, 4, 64))
packed = query.reshape(32, 4, 64)
host = np.ones((2, 16, 4, 64), np.float32)
rows = jnp.ones((16, 128))
lengths = np.array([0, 7, 32], np.int32)
integers = jnp.zeros(2, jnp.int32)
tables = jnp.zeros((2, 4), jnp.int32)
pages = jnp.zeros((8, 16, 4, 64))
shape = jax.ShapeDtypeStruct((2, 16, 4, 64), jnp.float32)
mesh = Mesh(np.array(jax.devices()), ("data",))
split = PartitionSpec("data")
asked: bool = bool(rows.sum() > 0)

# Attention
out: jax.Array = ejkernel.flash_attention(query, query, query)
out = ejkernel.flash_attention(query, query, query, causal=True, sliding_window=128)
out = ejkernel.flash_attention(host, host, host, sliding_window=(128, None), softmax_scale=1)
out = ejkernel.flash_attention(query, query, query, sliding_window=[64, 0], softmax_scale=np.float32(0.1))
out, lse = ejkernel.flash_attention(query, query, query, return_lse=True)
either = ejkernel.flash_attention(query, query, query, return_lse=asked)
out = either[0] if isinstance(either, tuple) else either
out = ejkernel.flash_attention(query, query, query, mask_info=MaskInfo.from_segments(integers[None]))
out = ejkernel.flash_attention(query, query, query, mask_info=MaskInfo.from_attention_mask(jnp.ones((2, 16), bool)))
out = ejkernel.flash_attention(query, query, query, platform=("cuda", "triton"), precision="highest")
out = ejkernel.flash_attention(query, query, query, platform="xla", cfg={"block_q": 64})
out = ejkernel.flash_attention(query, query, query, platform=ejkernel.Platform.XLA, cfg=FlashAttentionConfig())
out = ejkernel.flash_attention(query, query, query, precision=jax.lax.Precision.HIGH, logits_dtype=jnp.bfloat16)
out = ejkernel.flash_attention(query, query, query, dropout_prob=0.1, dropout_seed=jax.random.key(0))
out = ejkernel.flash_attention(query, query, query, dropout_prob=0.1, dropout_seed=3, logits_dtype="bfloat16")
out = ejkernel.flash_attention(query, query, query, mesh=mesh, in_specs=(split, split, split), out_specs=split)
out = ejkernel.modules.flash_attention(query, query, query, causal=True, causal_alignment="bottom_right")
out = flash_attention(packed, packed, packed, cum_seqlens_q=lengths, chunk_size=None)
out = ejkernel.flash_attn_varlen(packed, packed, packed, lengths, causal=True, layout="thd")
out, lse = ejkernel.flash_attn_varlen(packed, packed, packed, lengths, None, 16, 16, return_lse=True)
out = ejkernel.scaled_dot_product_attention(query, query, query, mask=jnp.ones((1, 1, 16, 16), bool), is_causal=True)
out, weights = ejkernel.attention(query, query, query, init_bias=lambda: jnp.zeros((16, 16)), softmax_dtype=jnp.float32)
layout = ejkernel.block_sparse_layout(16, mask_builder=lambda q, k: (q - k) % 2 == 0, causal=False)
out = ejkernel.blocksparse_attention(query, query, query, qkv_layouts=layout)
out = ejkernel.blocksparse_attention(query, query, query, mask_builder=np.ones((1, 1), bool), causal=None)
out = ejkernel.ring_attention(query, query, query, axis_name="data", layout="zigzag")
out, lse = ejkernel.ring_attention(query, query, query, axis_name=("data",), return_lse=True)
out = ejkernel.ring_attention(query, query, query, axis_name="data", strategy="all_to_all")
out = ejkernel.sequence_parallel(ejkernel.gated_delta_rule, "data")(query, query, query, query[..., 0])
out = ejkernel.zigzag_unshard(ejkernel.zigzag_shard(host, 2), 2)
out = ejkernel.native_sparse_attention(query, query, query, block_counts=4, window_size=8)
out, lse = ejkernel.apply_native_sparse_attention(query, query, query, integers, return_lse=True)
out = ejkernel.flash_mla(query, rows, rows, rows, absorbed=True)

# Serving
out = ejkernel.unified_attention(packed, pages, pages, integers, tables, lengths, k_scale=0.5, layout="pthd")
out, lse = ejkernel.unified_attention(packed, pages, pages, integers, tables, lengths, v_scale=rows[0], return_lse=True)
out = ejkernel.page_attention(packed, pages, pages, integers, tables, sliding_window=8)
out, lse = ejkernel.decode_attention(packed, packed, packed, tables, integers, page_size=1)
out = ejkernel.ragged_decode_attention(packed, query, query, integers, integers, sliding_window=(7, 0))
keys, values = ejkernel.paged_cache_update(packed, packed, pages, pages, integers, tables, lengths, k_scale=np.float32(2))
out, keys, values = ejkernel.chunked_prefill_paged_decode(
    packed, packed, packed, pages, pages, integers, tables, lengths, platform=["xla", "cuda"]
)

# Recurrences
out = ejkernel.gated_delta_rule(query, query, query, rows, chunk_size=64)
out, state = ejkernel.gated_delta_rule(query, query, query, rows, return_state=True)
out, state = ejkernel.gated_delta_product(query, query, query, rows, num_householder=2, return_state=True)
out, state = ejkernel.recurrent_attention(query, query, query, g=rows, return_state=True, reverse=True)
out = ejkernel.lightning_attention(query, query, query, layer_idx=0, num_layers=2)
out, state = ejkernel.lightning_attention(query, query, query, layer_idx=0, num_layers=2, return_state=True)
out = ejkernel.lightning_attention(query, query, query, layer_idx=0, num_layers=2, slopes="minimax", softmax_scale=1.0)
out, state = ejkernel.gla(query, query, query)
out, (matrix, vector, maximum) = ejkernel.mlstm(query, query, query, rows, rows, forget_activation="exp")
out, mlstm_state = ejkernel.mlstm(query, query, query, rows, rows, initial_state=(matrix, vector, maximum), cu_seqlens=lengths)
out = ejkernel.rwkv4(rows[0], rows[0], query, query)
out, state = ejkernel.causal_conv1d(rows, rows[0], activation="silu", return_state=True)
out, state, conv = ejkernel.state_space_v1(rows, rows, rows, rows, None, rows, act_fn=jax.nn.silu)
out, state, conv = ejkernel.state_space_v2(
    query, rows[0], query, query, rows, rows, rows, dt_bias=rows[0], dt_softplus=True, cu_seqlens=lengths,
    use_gated_rmsnorm=True, norm_before_gate=False, norm_weight=rows[0], norm_group_size=64,
)  # fmt: skip

out, (theta, memory, last_key, last_x) = ejkernel.mamba3(query, rows, query, query, None, rows, rows, query, dt_softplus=True)
out, mamba_state = ejkernel.mamba3(
    query, rows[0], query, query, rows[0], rows, rows, query, B_bias=rows, C_bias=rows, dt_bias=rows[0],
    initial_state=(theta, memory, last_key, last_x), cu_seqlens=lengths,
)  # fmt: skip

# Rows, products, losses
out = ejkernel.rms_norm(rows, rows[0], epsilon=1e-5, axis=-1)
out, stream = ejkernel.fused_add_rms_norm(rows, rows, platform="auto")
out = ejkernel.gated_rms_norm(rows, rows, rows[0], norm_before_gate=False, group_size=32, act_fn=jax.nn.sigmoid)
out = ejkernel.softmax(host, axis=(0, 1), where=host > 0, scale=2)
embedding = ejkernel.LlamaRotaryEmbedding(64, scaling={"rope_type": "linear", "factor": 2.0})
embedding = ejkernel.LlamaRotaryEmbedding.from_config({"rope_theta": 1e6}, head_size=64, layer_type=None)
cos, sin = embedding(jnp.arange(16), 16)
turned, other = ejkernel.llama_rope(query, query, cos, sin, layout="BTHD")
out = ejkernel.mean_pooling(query, cu_seqlens=None)
out = ejkernel.grouped_matmul(rows, pages, integers, group_offset=0, preferred_element_type=jnp.float32)
out = ejkernel.quantized_matmul(rows, integers, rows, mode="nf4", bits=None)
out = ejkernel.quantized_matmul(rows, integers, rows, mode="mxfp4", group_sizes=integers, group_offset=0)
weights, experts = ejkernel.moe_route(rows, 2, bias=rows[0], scoring="sigmoid", num_groups=8, top_groups=4, scale=2.5)
permuted = ejkernel.moe_permute(rows, experts, 64)
out = ejkernel.moe_unpermute(permuted.rows, permuted.positions, weights)
router_loss = ejkernel.moe_load_balancing_loss(rows, experts) + ejkernel.moe_z_loss(rows, where=host[0] > 0)
out = ejkernel.scaled_matmul(rows, rows, 0.5, rows[0], transpose_rhs=True, out_dtype=jnp.float32)
out = ejkernel.fused_linear(rows, rows, rows[0], residual=rows, activation="silu")
out = ejkernel.gated_linear_unit(rows, rows, activation="gelu_tanh", limit=7.0)
drawn: jax.Array = ejkernel.sample_tokens(rows, jax.random.key(0), top_k=50, top_p=rows[:, 0], temperature=0.7)
drawn, drawn_logprobs = ejkernel.sample_tokens(host, integers, top_k=integers[0], min_p=0.1, return_logprobs=True)
loss: jax.Array = ejkernel.fused_cross_entropy(rows, integers, reduction="sum", label_smoothing=0.1).loss
loss, z_loss, weight = ejkernel.fused_cross_entropy(targets=integers, hidden=rows, lm_head_weight=rows)
loss = ejkernel.token_logprobs(rows, rows, integers, temperature=0.7)
loss, weight = ejkernel.fused_kl_divergence(rows, rows, direction="jsd", beta=0.5)

# Class forms and the executor
out = FlashAttention()(query, query, query, causal=True)
out, lse = FlashAttention()(query, query, query, return_lse=True)
norm = RmsNorm()
out = norm(rows, epsilon=1e-6)
executor = create_default_executor()
out = executor(norm, rows, rows[0])
out, lse = executor(FlashAttention(), query, query, query, return_lse=True)
out = ejkernel.Executor()(ejkernel.rms_norm, rows)


# Masks, settings, inspection
class Model:
    """A layer that holds a mask and class forms."""

    def __init__(self, mask: MaskInfo | None = None) -> None:
        self.mask = (
            MaskInfo.from_lengths(integers, 16, causal=True) if mask is None else mask.apply_causal().apply_sliding_window(8)
        )
        self.attend = FlashAttention()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.attend(x, x, x, mask_info=self.mask)


out = jax.jit(Model())(query)
gradient = jax.grad(lambda x: ejkernel.rms_norm(x).sum())(rows)
out = jax.vmap(lambda x: ejkernel.softmax(x))(rows)
with ejkernel.use("xla", forbid={"cuda"}, custom_gradients=False):
    hessian = jax.hessian(lambda x: ejkernel.softmax(x).sum())(rows)
with ejkernel.overlay({"rms_norm": {"block_rows": 8}}):
    out = ejkernel.rms_norm(rows)
chosen: str | None = ejkernel.explain("flash_attention", shape, shape, shape, causal=True).chosen
explanation = ejkernel.explain(ejkernel.rms_norm, rows).to_dict()
result = ejkernel.autotune(lambda x: ejkernel.rms_norm(x), rows)
attend = kernel_registry.get("flash_attention", platform=ejkernel.Platform.XLA, backend=ejkernel.Backend.CPU)


@kernel_registry.register("doubled", "mine", "any", priority=10)
def doubled(x: jax.Array) -> jax.Array:
    """A kernel of one's own."""
    return x * 2


out = doubled(rows)
try:
    ejkernel.rms_norm(rows, platform="cuda")
except ejkernel.NoKernelError as error:
    print(error.explanation, ejkernel.__version__)
