"""Linear recurrences of matrix states on XLA: chunks made of matrix products, one after the other."""

from ejkernel_xla.linear_recurrence.kernel import backward, forward

__all__ = ["backward", "forward"]
