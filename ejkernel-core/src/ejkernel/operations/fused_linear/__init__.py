"""A linear layer with the norm before it, and the gate or the residual addition after it."""
