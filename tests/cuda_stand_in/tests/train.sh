#!/usr/bin/env bash
# train.sh PROJECT BINARY OUT PRECISION DEVICE STEPS [--set ...]
# Some steps of the quickstart model, 2 rows of 64 packed tokens; prints loss and gradient norm of each, so that cuda can be
# held against cpu. Wants LD_LIBRARY_PATH, CUDA_PATH and STAND_IN_PTXAS as the README says. Minutes cold, seconds from the caches.
set -u
project=$1 binary=$2 out=$3 precision=$4 device=$5 steps=$6; shift 6
mkdir -p "$out"; run=$out/$precision-$device
cat >"$run.toml" <<T
output_dir = "$run"
[model]
path = "quickstart/model"
[lora]
r = 4
[data]
max_length = 64
packing = true
shuffle = false
[[data.train]]
path = "quickstart/train.jsonl"
[train]
precision = "$precision"
micro_batch_size = 2
max_steps = $steps
gradient_checkpointing = true
[optimizer]
learning_rate = 1e-3
[logging]
tensorboard = false
gpu_sample_ms = 0
[checkpoint]
save_minutes = 0
[device]
name = "$device"
T
rm -rf "$run"
export STAND_IN_LOG=$run.json CUBECL_AUTOTUNE_LEVEL=${CUBECL_AUTOTUNE_LEVEL:-0} STAND_IN_LAUNCH_S=${STAND_IN_LAUNCH_S:-4}
cd "$project" && "$binary" "$run.toml" --quiet "$@" >"$run.out" 2>"$run.err"
echo "$precision on $device: rc $?"
[ -e "$run/metrics.jsonl" ] && python3 - "$run/metrics.jsonl" <<'P'
import json, sys
for line in open(sys.argv[1]):
    row = json.loads(line)
    if "grad_norm" in row:
        print("  step", row["step"], "loss", row["loss"], "grad_norm", row["grad_norm"])
P
