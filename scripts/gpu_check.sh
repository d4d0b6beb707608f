#!/usr/bin/env bash
# Checks a CUDA build on a machine with a GPU: its results, its figures, its speed. The machine needs the built binary,
# this checkout's scripts and configs, and a small model, but neither Rust nor a network.
#
# usage: [GPU_CHECK_DEVICE=cuda] scripts/gpu_check.sh BINARY MODEL_DIR OUT_DIR [SECTION...]
#
#   BINARY     lora-train built with --features cuda (target/release/lora-train); .xz is unpacked
#   MODEL_DIR  a small model as a Hugging Face folder, for example quickstart/model
#   OUT_DIR    gets gpu_check.json, and the runs behind it
#   SECTION    correctness offload memory telemetry plan commands bench-1b bench-8b (default: all, in this order)
#
#   correctness  losses and gradient norms of 8 steps in f32 and bf16, against the CPU's
#   offload      8 steps with block inputs in host memory: the same losses as without
#   memory       200 steps: telemetry fields present and sane, memory flat
#   telemetry    40 s of training beside nvidia-smi: every figure that the card offers, against nvidia-smi's; the UUID; parts
#                against wall time; energy against power (GPU_CHECK_SECONDS, GPU_CHECK_SMI)
#   plan         plan's estimated peak against NVML's, for models of configs/ from tiny to 1B (GPU_CHECK_PLAN: how many of them)
#   commands     doctor, plan --calibrate, and tune for a minute (GPU_CHECK_TUNE_MINUTES), as JSON
#   bench-1b     Llama 3.2 1B shape, random weights, bf16, r=16, 4 x 2048
#   bench-8b     Llama 3.1 8B shape, random weights, bf16, r=16, 1 x 4096, gradient checkpointing
#
# scripts/bench_gpu_vs_peft.py is the benchmark against PEFT. GPU_CHECK_DEVICE=cpu tests the first sections without a GPU;
# scripts/gpu_check_rehearsal.sh tests telemetry, plan and commands, and that missing figures are noticed.
#
# Exit code: 0 if every check held, 1 if one did not.
set -euo pipefail

[ $# -ge 3 ] || { sed -n '2,25s/^# \{0,1\}//p' "$0"; exit 2; }
root="$(cd "$(dirname "$0")/.." && pwd)"
binary=$1 model=$2 out=$3
shift 3
sections=${*:-correctness offload memory telemetry plan commands bench-1b bench-8b}
device=${GPU_CHECK_DEVICE:-cuda}
mkdir -p "$out"
case $binary in
    *.xz) xz -dkc "$binary" >"$out/lora-train"; chmod +x "$out/lora-train"; binary="$out/lora-train" ;;
esac
binary="$(realpath "$binary")" model="$(realpath "$model")" out="$(realpath "$out")"
cd "$root"

recipe() { # NAME PRECISION DEVICE STEPS [CHECKPOINTING]
    write "$@"
    rm -rf "${out:?}/$1"
    "$binary" "$out/$1.toml" --quiet
}

write() { # as recipe
    cat >"$out/$1.toml" <<EOF
output_dir = "$out/$1"
[model]
path = "$model"
[lora]
r = 8
[data]
max_length = 256
shuffle = false
[[data.train]]
path = "quickstart/train.jsonl"
[[data.eval]]
path = "quickstart/eval.jsonl"
[train]
precision = "$2"
micro_batch_size = 8
max_steps = $4
gradient_checkpointing = ${5:-true}
[optimizer]
learning_rate = 1e-3
[device]
name = "$3"
EOF
}

bench() { # NAME CONFIG MICRO_BATCH LENGTH STEPS
    cat >"$out/$1.toml" <<EOF
output_dir = "$out/$1"
[model]
path = "configs/$2"
init = "random"
dtype = "bf16"
[lora]
r = 16
[data]
max_length = $4
[train]
precision = "bf16"
micro_batch_size = $3
max_steps = $5
gradient_checkpointing = true
[device]
name = "$device"
EOF
    "$binary" bench "$out/$1.toml" | tail -n 1 >"$out/$1.json"
}

for section in $sections; do
    echo "== $section" >&2
    case $section in
        correctness)
            for precision in f32 bf16; do
                recipe "gpu-$precision" "$precision" "$device" 8
            done
            recipe cpu-f32 f32 cpu 8
            ;;
        offload)
            recipe kept f32 "$device" 8
            recipe offload f32 "$device" 8 '"offload"'
            ;;
        memory) recipe memory bf16 "$device" 200 ;;
        telemetry)
            seconds=${GPU_CHECK_SECONDS:-40}
            write telemetry bf16 "$device" 1000000
            # Too long for epochs or steps to end it, with some evaluations and checkpoints.
            sed -i -e '/^max_steps/a num_epochs = 1000000' "$out/telemetry.toml"
            cat >>"$out/telemetry.toml" <<EOF
[checkpoint]
save_steps = 100
save_total_limit = 1
[eval]
eval_steps = 250
max_batches = 1
[watchdog]
patience = 0
EOF
            rm -rf "$out"/telemetry "$out"/telemetry*.json
            python3 scripts/gpu_telemetry.py "$binary" "$out/telemetry.toml" "$out" "$seconds"
            ;;
        plan)
            python3 scripts/check_plan.py --configs --device "$device" --binary "$binary" --first "${GPU_CHECK_PLAN:-100}" \
                --result "$out/plan.json" || echo "a plan is off, or was not measured" >&2
            ;;
        commands)
            rm -f "$out"/{doctor,tune,calibrated}.json
            write tune f32 "$device" 8
            "$binary" doctor --json >"$out/doctor.json" || echo "doctor failed" >&2
            "$binary" plan "$out/tune.toml" --calibrate --json >"$out/calibrated.json" || echo "plan failed" >&2
            "$binary" tune "$out/tune.toml" --json --max-minutes "${GPU_CHECK_TUNE_MINUTES:-1}" --out "$out/tuned.toml" \
                >"$out/tune.json" || echo "tune failed" >&2
            ;;
        bench-1b) bench bench-1b llama-3.2-1b.json 4 2048 12 ;;
        bench-8b) bench bench-8b llama-3.1-8b.json 1 4096 8 ;;
        *) echo "error: unknown section $section" >&2; exit 2 ;;
    esac
done

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader >"$out/gpu.txt" 2>/dev/null || true
exec python3 scripts/gpu_check.py "$out"
