#!/usr/bin/env bash
# Prepares a Debian or Ubuntu machine to build `--features cuda`. Neither a GPU nor the CUDA toolkit is needed to build:
# the driver and NVRTC are loaded when the program starts on a CUDA device (docs/cuda.md lists what it needs there).
#
# burn's CubeCL links LLVM, its other compiler of kernels, also where NVRTC compiles them (only `--features cuda-llvm` lets
# LLVM do so). Its build script downloads its own bundle. Where that download is not possible, this script puts the
# distribution's LLVM in the bundle's place. It is one major version older than the bundle's (22 instead of 23), but builds
# and links; scripts/gpu_half_hour.sh checks its results. It knows the PTX of CUDA 13.0 at most: see docs/cuda.md.
#
# usage: scripts/setup_cuda_build.sh            (needs root or sudo for the packages)
set -euo pipefail

version=22
bundle=tracel-llvm-23.1.0-4   # what tracel-llvm-bundler of Cargo.lock looks for
prefix="${XDG_DATA_HOME:-$HOME/.local/share}/tracel/$bundle"

if [ -e "$prefix/.tracel-llvm-installed" ]; then
    echo "$prefix is there: nothing to do"
    exit 0
fi

as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
packages=(llvm-$version-dev libpolly-$version-dev libzstd-dev zlib1g-dev libxml2-dev libz3-dev libffi-dev libedit-dev
    libcurl4-openssl-dev)
if ! dpkg -s "${packages[@]}" >/dev/null 2>&1; then
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${packages[@]}"
fi

llvm=$(llvm-config-$version --prefix)
mkdir -p "$prefix/bin"
for part in include lib share; do
    [ -e "$llvm/$part" ] && ln -sfn "$llvm/$part" "$prefix/$part"
done
# The bundler turns the path of libz3 that Debian prints into the flag -llibz3: print -lz3 instead.
cat >"$prefix/bin/llvm-config" <<EOF
#!/bin/sh
llvm-config-$version "\$@" | sed -E 's#[^ ]*/libz3\.so[^ ]*#-lz3#g'
EOF
chmod +x "$prefix/bin/llvm-config"
touch "$prefix/.tracel-llvm-installed"
echo "$prefix stands in for the LLVM bundle; now: cargo build --release --features cuda"
