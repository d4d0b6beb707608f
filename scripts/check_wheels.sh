#!/usr/bin/env bash
# Installs the wheels of two built programs in a fresh environment of Python, without a network: the one for the CPU, then CUDA's
# beside it, which must start in its place and find NVIDIA's packages there; and takes CUDA's away again. The demo must train.
#
# usage: scripts/check_wheels.sh CPU_PROGRAM CUDA_PROGRAM NVIDIA
#
#   NVIDIA   site-packages/nvidia of an environment with scripts/requirements-cuda.txt, which stands for what pip would bring
set -euo pipefail
cpu=$(realpath "$1") cuda=$(realpath "$2") nvidia=$(realpath "$3")
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
strip -o "$work/cpu" "$cpu"
strip -o "$work/cuda" "$cuda"
scripts/wheel.py "$work/cpu" "$work"
scripts/wheel.py --cuda "$work/cuda" "$work"

python3 -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
# Not as in an active environment.
doctor() { env -i HOME="$HOME" XDG_RUNTIME_DIR="$work" HF_HUB_OFFLINE=1 "$work/venv/bin/lora-train" doctor --json; }
on_cpu() { doctor | grep -F '"backends":["cpu"]' >/dev/null || { echo "error: $1 does not start the program for the CPU"; exit 1; }; }

pip install --no-index --find-links "$work" lora-train
on_cpu "pip install lora-train"

# Whoever has the wheel alone has a quickstart and the reference.
(cd "$work" && venv/bin/lora-train demo 2>demo.log && venv/bin/lora-train help lora.r >/dev/null) || { cat "$work/demo.log"; exit 1; }
[ -f "$work/lora-train-demo/run/adapter/adapter_model.safetensors" ] || { echo "error: the demo has trained no adapter"; exit 1; }

site=$(echo "$work"/venv/lib/python3*/site-packages)
ln -s "$nvidia" "$site/nvidia"
pip install --no-index --find-links "$work" --no-deps lora-train-cuda
doctor >"$work/doctor.json"
for found in '"backends":["cuda"' "\"toolkit\":{\"path\":\"$site/nvidia/cu13\",\"version\":[13,0],\"missing\":[]}" "libnvrtc.so"; do
    grep -F -e "$found" "$work/doctor.json" >/dev/null || { echo "error: no $found in"; cat "$work/doctor.json"; exit 1; }
done

pip uninstall --yes lora-train-cuda
on_cpu "pip uninstall lora-train-cuda"
pip uninstall --yes lora-train
[ ! -e "$work/venv/bin/lora-train" ] || { echo "error: uninstalled, and still there"; exit 1; }
