#!/usr/bin/env bash
# Runs the CUDA build on a machine without a GPU, on a stand-in for the driver that executes its kernels on the processor
# (tests/cuda_stand_in), and holds what it computes against the CPU's, and what it asks of the driver against bounds.
#
# usage: scripts/cuda_without_gpu.sh [--prepare] [--build] [--tests] [--full] [--only NAME...] [--json FILE] [BINARY]
#
#   --prepare  only fetch what the checks need
#   --build   build the binary, also where BINARY is there; without BINARY it is always built
#   --tests   run the library's own tests of this device first (tests/cubecl.rs)
#   --full    all checks, also those that take long from nothing: about an hour instead of ten minutes
#   --only    checks whose name starts with NAME: f32 bf16 f16 fault bench doctor ranks sm_80 sm_120 random
#   --json    writes every figure, and the registers and spills of the kernels
#
# Compiled kernels, and NVIDIA's packages from PyPI (half a gigabyte), are kept in $LORA_TRAIN_CI_CACHE
# (default: ~/.cache/lora-train-ci). Needs Python with venv, a C compiler, and Open MPI's mpirun for two ranks.
# $LORA_TRAIN_GPU_BUILD (default: --features cuda) is what cargo is told of builds.
#
# Exit code: 0 if every check held, 1 if one did not.
set -euo pipefail

root="$(cd "$(dirname "$0")/.." && pwd)"
cache="${LORA_TRAIN_CI_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lora-train-ci}"
requirements=("$root"/scripts/requirements-{cuda,kernels}.txt)
venv="$cache/cuda-venv"

read -ra asked <<<"${LORA_TRAIN_GPU_BUILD:---features cuda}"
prepare= build= tests= binary= passed=()
while [ $# -gt 0 ]; do
    case $1 in
        --prepare) prepare=yes ;;
        --build) build=yes ;;
        --tests) tests=yes ;;
        --json) passed+=("$1" "$(realpath -m "$2")"); shift ;;
        --help | -h) sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) if [ -f "$1" ]; then binary=$(realpath "$1"); else passed+=("$1"); fi ;;
    esac
    shift
done

if ! cmp -s <(cat "${requirements[@]}") "$venv/installed-requirements"; then
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${requirements[@]/#/--requirement=}"
    cat "${requirements[@]}" >"$venv/installed-requirements"
fi
[ -z "$prepare" ] || exit 0

if [ -n "$build" ] || [ -z "$binary" ]; then
    (cd "$root" && cargo build --release --locked "${asked[@]}" --bin lora-train)
    binary=${binary:-${CARGO_TARGET_DIR:-$root/target}/release/lora-train}
fi

toolkit=$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13)

# The stand-in itself, on small kernels with known results.
work="$cache/cuda-stand-in"
mkdir -p "$work/kernels"
STAND_IN_DIR="$work/kernels" STAND_IN_PTXAS="$toolkit/bin/ptxas" make --silent -C "$root/tests/cuda_stand_in" test >/dev/null

if [ -n "$tests" ]; then
    # As lab.py sets it up for the binary. Not for cargo: it would build what looks at CUDA_PATH anew.
    python=$(python3 -c 'import pathlib, sys; print(pathlib.Path(sys.executable).resolve().parent)')
    runner="env PATH=$python:$PATH LD_LIBRARY_PATH=$root/tests/cuda_stand_in:$toolkit/lib CUDA_PATH=$toolkit"
    runner+=" STAND_IN_PTXAS=$toolkit/bin/ptxas STAND_IN_DIR=$work/kernels STAND_IN_TIME=first STAND_IN_EXEC=200000"
    runner+=" CUBECL_AUTOTUNE_LEVEL=0 LORA_TRAIN_CACHE=$work/cache/tests"
    # On one core; the other tests our own kernels meanwhile.
    (cd "$root" && CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$runner" \
        cargo test --release --locked "${asked[@]}" --test cubecl -- --ignored --test-threads 1) &
    tests=$!
fi

# Our own kernels: their PTX is that of their sources, and right by itself.
"$venv/bin/python" "$root/scripts/build_cuda_kernels.py" --check
mapfile -t programs < <(basename --suffix .py "$root"/tests/cuda_kernels/*.py | grep -vx device)
# In f16 without fp8, also before compute capability 8.0.
for test in "${programs[@]}" "attention --only hopper --order issue" "delta_rule --numbers f16" "rows --numbers f16" \
    {attention,cached_attention,cross_entropy,delta_rule,experts,low_rank,next,optimizer,rows}" --numbers f16.75"; do
    read -ra arguments <<<"$test"
    log="$work/${test// /}.log"
    STAND_IN_DIR="$work/kernels" "$venv/bin/python" "$root/tests/cuda_kernels/${arguments[0]}.py" --toolkit "$toolkit" \
        "${arguments[@]:1}" >"$log" || { cat "$log"; exit 1; }
done
[ -z "$tests" ] || wait "$tests"

exec python3 "$root/tests/cuda_stand_in/check.py" --toolkit "$toolkit" --work "$work" --binary "$binary" "${passed[@]}"
