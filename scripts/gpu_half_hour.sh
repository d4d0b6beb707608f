#!/usr/bin/env bash
# Measures a CUDA build on a machine with a GPU that is there for half an hour, in three parts of at most eight minutes:
#
#   1  is it sound:          what is installed, doctor, losses and gradients against the CPU's, telemetry against
#                            nvidia-smi, memory against `plan`, the first step with empty caches
#   2  how fast:             8B, 1B and 0.6B shapes with random weights, beside transformers + PEFT, with and without Liger
#   3  where the time goes:  by kernel (ncu), by operation; the other backend
#
# and in one of fourteen, where there is a card for a quarter of an hour alone:
#
#   4  what is not known:    what no card has run, or has run another way, the most telling first
#
# usage: scripts/gpu_half_hour.sh PART BINARY MODEL_DIR OUT [--llvm-binary FILE] [--again [ITEM...]]
#
#   BINARY         lora-train built for CUDA, or an .xz of it; it, this checkout and the model are all that is needed of ours
#   MODEL_DIR      quickstart/model
#   OUT            gets half_hour.json after every item, and at the end cache.tar.xz.*, the caches of our kernels: at most
#                  seven files. With them in OUT, the next part starts warm on another machine too
#   WORK           (environment; /tmp/gpu_half_hour) logs, runs and caches, which the next part on this machine goes on with
#   wheels/        optional, beside BINARY: wheels for a machine without a network (pip download --no-deps liger-kernel zstandard)
#   --llvm-binary  the build with the other kernel compiler, for part 3
#   --again        these items once more, or the whole part; otherwise a part goes on where it was stopped
#
# Rehearsal without a GPU, with tiny models: scripts/gpu_half_hour.sh PART BINARY quickstart/model OUT --rehearse cpu
set -euo pipefail

[ $# -ge 4 ] || { sed -n '2,24s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$4"
here="$(cd "$(dirname "$0")" && pwd)" out="$(realpath "$4")" work="${WORK:-/tmp/gpu_half_hour}"
if [ ! -e "$work/cache" ] && [ -e "$out/cache.tar.xz.00" ]; then
    mkdir -p "$work" && cat "$out"/cache.tar.xz.* | tar -C "$work" -xJ
fi
mkdir -p "$work/cache"
export XDG_CACHE_HOME="$work/cache" CUDA_CACHE_PATH="$work/cache/cuda" TRITON_CACHE_DIR="$work/triton"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
for wheel in "$(dirname "$2")"/wheels/*.whl; do
    # Triton reads the source of its kernels, so a wheel has to be unpacked.
    [ ! -e "$wheel" ] || python3 -m zipfile -e "$wheel" "$work/site"
done
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
if [[ " $* " == *" --rehearse cpu"* ]]; then
    # The tests' stand-ins for NVML and nvidia-smi.
    cc -shared -fPIC -O1 -DNO_ENERGY_COUNTER -o "$work/nvml.so" "$here/../tests/fixtures/nvml_stand_in.c"
    export LORA_TRAIN_NVML="$work/nvml.so" GPU_HALF_HOUR_SMI="python3 $here/../tests/fixtures/nvidia_smi_stand_in.py" CUDA_VISIBLE_DEVICES=0
fi
python3 "$here/gpu_half_hour.py" "$@" --work "$work" && status=0 || status=$?
rm -f "$out"/cache.tar.xz.*
# A machine gives back few and small files, and waits for nobody.
XZ_OPT="-1 -T0" timeout 60 tar -C "$work" -cJf "$work/cache.tar.xz" cache &&
    split -b 15M -d "$work/cache.tar.xz" "$work/cache.tar.xz." && [ ! -e "$work/cache.tar.xz.06" ] &&
    mv "$work"/cache.tar.xz.0? "$out/" || echo "the caches are too large or take too long, and stay here" >&2
exit $status
