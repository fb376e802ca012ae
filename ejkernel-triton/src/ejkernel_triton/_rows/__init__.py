"""What the normalisations over rows share: configs, capabilities, kernels and their launch."""
