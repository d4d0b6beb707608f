#!/usr/bin/env bash
# Rehearses scripts/gpu_check.sh without a GPU: telemetry, plan and commands on the CPU, with the tests' stand-ins for NVML
# and nvidia-smi. All checks must hold. For a stand-in with a missing or wrong figure, exactly that must be reported.
#
# usage: scripts/gpu_check_rehearsal.sh BINARY [SECONDS]
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2; }
root="$(cd "$(dirname "$0")/.." && pwd)"
binary="$(realpath "$1")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$root"
export GPU_CHECK_DEVICE=cpu GPU_CHECK_SECONDS="${2:-20}" GPU_CHECK_PLAN=2 GPU_CHECK_TUNE_MINUTES=0.5
export GPU_CHECK_SMI="python3 $root/tests/fixtures/nvidia_smi_stand_in.py" CUDA_VISIBLE_DEVICES=0

stand_in() { # NAME [DEFINE]...
    export LORA_TRAIN_NVML="$work/$1.so"
    shift
    cc -shared -fPIC -O1 "${@/#/-D}" -o "$LORA_TRAIN_NVML" tests/fixtures/nvml_stand_in.c
}

# For the tests, its energy counter disagrees with its power; without a counter, power is integrated.
stand_in whole NO_ENERGY_COUNTER
scripts/gpu_check.sh "$binary" quickstart/model "$work/whole" telemetry plan commands

notices() { # WHAT [DEFINE]...
    local what=$1
    shift
    stand_in defect "$@"
    rm -rf "$work/defect"
    if scripts/gpu_check.sh "$binary" quickstart/model "$work/defect" telemetry >"$work/said" 2>&1; then
        cat "$work/said"
        echo "FAIL  ${*:-another energy}: not noticed"
        exit 1
    fi
    grep -q "^FAIL .*$what" "$work/said" || { cat "$work/said"; echo "FAIL  ${*:-another energy}: something else is told"; exit 1; }
    echo "noticed  ${*:-another energy}: $(grep "^FAIL .*$what" "$work/said")"
}

export GPU_CHECK_SECONDS=5
notices "energy against the integral of power"
notices "missing: gpu_sm_activity_percent" NO_ENERGY_COUNTER NO_GPM
notices "missing: .*gpu_sm_clock_mhz" OLD_DRIVER
notices "UUID of the sampled GPU: none" INIT_FAILS
echo "the rehearsal held"
