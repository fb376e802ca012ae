"""The common part of the operations that rotate queries and keys."""
