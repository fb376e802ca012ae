"""A user's calls, every one with a mistake: pyright and mypy report each line that ends in `# mistake`. It is read, never run."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import ejkernel
from ejkernel import FlashAttention, RmsNorm, create_default_executor

query = jnp.ones((2, 16, 4, 64))
rows = jnp.ones((16, 128))
integers = jnp.zeros(2, jnp.int32)
executor = create_default_executor()

ejkernel.flash_atention(query, query, query)  # mistake
ejkernel.flash_attention(query, query)  # mistake
ejkernel.flash_attention(query, query, query, casual=True)  # mistake
ejkernel.flash_attention(query, query, query, sliding_window="128")  # mistake
ejkernel.flash_attention(query, query, query, sliding_window=(1, 2, 3))  # mistake
ejkernel.flash_attention(query, query, query, mask_info=[1, 0])  # mistake
ejkernel.flash_attention(query, query, query, causal_alignment="bottom-right")  # mistake
out, lse = ejkernel.flash_attention(query, query, query, return_lse=True)[0], ejkernel.flash_attention(query, query)  # mistake
single: jax.Array = ejkernel.flash_attention(query, query, query, return_lse=True)  # mistake
ejkernel.flash_attention([[1.0]], query, query)  # mistake
ejkernel.flash_attention(query, query, query, platform=3)  # mistake
ejkernel.flash_attention(query, query, query, cfg=64)  # mistake
ejkernel.flash_attention(query, query, query, mesh="data")  # mistake
ejkernel.flash_attention(query, query, query, precision="best")  # mistake
ejkernel.modules.flash_attention(query, query, query, softmax_scale="auto")  # mistake
ejkernel.gated_delta_rule(query, query, query, rows).append(1)  # mistake
pair: tuple[jax.Array, jax.Array] = ejkernel.rwkv4(rows[0], rows[0], query, query)  # mistake
ejkernel.lightning_attention(query, query, query, layer_idx=0)  # mistake
ejkernel.ring_attention(query, query, query, layout="zig-zag")  # mistake
ejkernel.ring_attention(query, query, query, strategy="ulysses")  # mistake
ejkernel.sequence_parallel(ejkernel.rms_norm, 3)  # mistake
ejkernel.fused_cross_entropy(rows, integers, reduction="average")  # mistake
print(ejkernel.fused_cross_entropy(rows, integers).losses)  # mistake
print(ejkernel.token_logprobs(rows, rows, integers).loss)  # mistake
ejkernel.ragged_decode_attention(query, query, query, integers, integers, sliding_window=8)  # mistake
ejkernel.quantized_matmul(rows, integers, rows, mode="int4")  # mistake
ejkernel.moe_route(rows, 2, scoring="relu")  # mistake
ejkernel.scaled_matmul(rows, rows, 0.5)  # mistake
ejkernel.fused_linear(rows, rows, activation="swiglu")  # mistake
ejkernel.gated_linear_unit(rows, rows, activation="swish")  # mistake
ejkernel.sample_tokens(rows)  # mistake
ejkernel.rms_norm(rows, eps=1e-5)  # mistake
FlashAttention()(query, query, query, casual=True)  # mistake
RmsNorm(rows)  # mistake
executor(FlashAttention(), query, query)  # mistake
wrong: tuple[jax.Array, jax.Array] = executor(RmsNorm(), rows)  # mistake
