#!/usr/bin/env bash
# Install the packages of a requirements file in an image, as root. Dockerfile and gpt4d.def call it.
#   TORCH_INDEX=URL install.sh requirements.txt
# TORCH_INDEX is the package index of torch: https://pypi.org/simple has the CUDA build.
set -euo pipefail

# torch.compile needs a C compiler.
apt-get update
apt-get install --yes --no-install-recommends gcc libc6-dev
rm -rf /var/lib/apt/lists/*

# torch comes first, with the triton of its own index: the pinned triton replaces files of the ROCm build.
pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' "$1")"
grep -v '^triton==' "$1" | pip install --no-cache-dir -r /dev/stdin
