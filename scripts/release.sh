#!/usr/bin/env bash
# Builds an archive of the program for the kind of machine that this runs on, and its checksum:
# lora-train-VERSION-TARGET.tar.gz, with --cuda lora-train-VERSION-TARGET-cuda.tar.gz; and a wheel for pip (scripts/wheel.py).
#
# usage: scripts/release.sh [--cuda] [--out DIR] [BINARY]
#
#   --cuda   with NVIDIA GPUs (scripts/setup_cuda_build.sh comes first)
#   --out    where both are written (default: target/release-archives)
#   BINARY   packs this one instead of building
#
# On x86-64 the program chooses AVX-512, AVX2 or neither when it starts. The archive holds the stripped program, completions,
# the manual page, the recipes, the quickstart's model and rows, README, docs, measurements and licence. The same commit and
# compiler give the same bytes. Prints the paths, and the glibc that is needed.
set -euo pipefail
cd "$(dirname "$0")/.."

features=() suffix= profile=dist out="${CARGO_TARGET_DIR:-target}/release-archives" binary=
while [ $# -gt 0 ]; do
    case $1 in
        --cuda) features=(--features cuda) suffix=-cuda profile=release ;;
        --out) out=$2; shift ;;
        --help | -h) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) binary=$1 ;;
    esac
    shift
done

if [ -z "$binary" ]; then
    cargo build --profile "$profile" --locked "${features[@]}" --bin lora-train
    binary="${CARGO_TARGET_DIR:-target}/$profile/lora-train"
fi
target=$(rustc -vV | sed -n 's/^host: //p')
version=$("$binary" --version | cut -d ' ' -f 2)
name="lora-train-$version-$target$suffix"

mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/$name/completions"
strip -o "$work/$name/lora-train" "$binary"
for shell in bash zsh fish; do "$binary" completions "$shell" >"$work/$name/completions/lora-train.$shell"; done
"$binary" completions man >"$work/$name/lora-train.1"
git archive HEAD README.md LICENSE benches docs recipes quickstart | tar -x -C "$work/$name"

tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" -C "$work" -c "$name" |
    gzip -n -9 >"$out/$name.tar.gz"
(cd "$out" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
glibc=$(objdump -T "$work/$name/lora-train" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1)
echo "$out/$name.tar.gz: $(du -h "$out/$name.tar.gz" | cut -f 1), needs ${glibc/_/ } or newer"
scripts/wheel.py ${suffix:+--cuda} "$work/$name/lora-train" "$out"
