#!/usr/bin/env bash
# Make a Python environment for the scripts, and for the tests that read our files with other tools.
#
# usage: scripts/setup_python.sh [--without-torch] [VENV]        (default: .venv)
#
# Everything is pinned: requirements.txt holds what the tests and get_models.py need (a minute), requirements-torch.txt
# adds torch, transformers and PEFT for golden files, benchmarks and the PEFT checks (some gigabytes if the index offers
# only the CUDA build of torch; PIP_EXTRA_INDEX_URL may name an index with the CPU build). An up-to-date environment is
# left alone.
set -euo pipefail

here="$(dirname "$0")"
requirements="$here/requirements-torch.txt"
venv=.venv
for argument in "$@"; do
    case "$argument" in
        --without-torch) requirements="$here/requirements.txt" ;;
        -*) echo "error: unknown option $argument; usage: $0 [--without-torch] [VENV]" >&2; exit 2 ;;
        *) venv="$argument" ;;
    esac
done

wanted="$(cat "$here/requirements.txt" "$requirements")"
if [[ -x "$venv/bin/python" && "$(cat "$venv/installed-requirements" 2>/dev/null)" == "$wanted" ]]; then
    echo "$venv is up to date"
    exit 0
fi
command -v python3 >/dev/null || { echo "error: python3 is not installed" >&2; exit 1; }
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || { echo "error: $(python3 --version) is too old, 3.11 or newer is needed" >&2; exit 1; }
python3 -m venv "$venv" \
    || { echo "error: python3 -m venv failed (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$requirements"
printf '%s\n' "$wanted" > "$venv/installed-requirements"
echo "$venv is ready"
