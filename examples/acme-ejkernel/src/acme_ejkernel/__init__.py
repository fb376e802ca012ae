"""A third-party platform for ejkernel. Kept empty: it runs before the plugin module at every `import ejkernel`."""
