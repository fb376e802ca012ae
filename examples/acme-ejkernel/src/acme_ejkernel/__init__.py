"""A third-party platform for ejkernel. Kept empty: it runs before the light module at every `import ejkernel`."""
