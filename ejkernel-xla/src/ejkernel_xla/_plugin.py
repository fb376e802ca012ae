"""The light plugin module of ejkernel-xla: imports the standard library and `ejkernel.plugin` only."""

from __future__ import annotations

from ejkernel.plugin import API_LEVEL, Implementation, Plugin, hookimpl


def _both_phases(operation: str, **record: object) -> tuple[Implementation, ...]:
    """Plain JAX code for both phases of one operation, `ejkernel_xla.<operation>:forward` and `:backward`."""
    return tuple(
        Implementation(
            operation=operation,
            phase=phase,
            target=f"ejkernel_xla.{operation}:{phase}",
            partitioning="native",
            plain_jax=True,
            **record,  # pyright: ignore[reportArgumentType]
        )
        for phase in ("forward", "backward")
    )


@hookimpl
def ejkernel_plugin() -> Plugin:
    return Plugin(
        name="xla",
        api_level=API_LEVEL,
        summary="Every operation in plain JAX, on every device; the fallback of all others",
        implementations=(
            *_both_phases("cross_entropy", configs="ejkernel_xla._vocabulary:CONFIGS"),
            *_both_phases("flash_attention", configs="ejkernel_xla.flash_attention.config:CONFIGS"),
            *_both_phases("grouped_matmul", configs="ejkernel_xla.grouped_matmul.config:CONFIGS"),
            *_both_phases("kl_divergence", configs="ejkernel_xla._vocabulary:CONFIGS"),
            *_both_phases("layer_norm"),
            *_both_phases("mean_pooling"),
            *_both_phases("rms_norm"),
            *_both_phases("rope"),
            *_both_phases("softmax"),
        ),
    )
