"""The blocks of keys that each query of native sparse attention reads."""
