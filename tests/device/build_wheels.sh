#!/bin/bash
# Build the wheels of every distribution into .whl/ and add what a bare GPU machine lacks.
#   tests/device/build_wheels.sh [python]     python: 3.12 with pip, build back ends and nvcc on the PATH
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
rm -rf .whl
mkdir .whl
for distribution in ejkernel-core ejkernel-xla ejkernel-triton ejkernel-pallas ejkernel-cuda benchmarks examples/train; do
  "$python" -m pip wheel -q --no-deps --no-build-isolation -w .whl "./$distribution"
done
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp -d .whl \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  jax-linear-attention==0.1.0 jax_triton==0.3.1 absl-py importlib-metadata lazy-importer zipp platformdirs filelock pytest-xdist execnet \
  equinox optax wadler-lindig beartype hypothesis sortedcontainers
git rev-parse HEAD > .whl/commit
du -sh .whl
