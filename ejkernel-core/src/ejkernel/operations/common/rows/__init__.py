"""The common part of the normalisations over rows."""
