"""The delta rule and its relatives on XLA."""

from ejkernel_xla.delta_rule.kernel import backward, forward

__all__ = ["backward", "forward"]
