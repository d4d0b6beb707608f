#!/usr/bin/env bash
# Breaks runs on purpose and checks what is left: everything listed in tests/README.md, with many kills.
#
#   scripts/soak.sh [KILLS [SEED]]            the tests: kills of each of the three kinds of run (default 100), which moments
#   scripts/soak.sh --long [KILLS [SEED]]     then also what takes long: each fuzzer for FUZZ_SECONDS (default 60), the
#                                             kernels under Valgrind, and the dependencies
#
# As root, the tests with a small disk and with process 1 of a container run too; otherwise they report that they are
# skipped. --long needs what scripts/fuzz.sh, scripts/memcheck.sh and cargo deny need; a missing tool is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

long=
if [ "${1:-}" = --long ]; then
    long=yes
    shift
fi
export LORA_TRAIN_SOAK_KILLS="${1:-100}" LORA_TRAIN_SOAK_SEED="${2:-1}"
failed=()
part() {
    echo "== $*"
    "$@" || failed+=("$*")
}

# One test at a time: some measure times. Every part runs, even after a failed part.
part cargo test --release --locked --no-fail-fast --test it --test hostile -- --nocapture --test-threads 1
part cargo test --release --locked --lib -- --test-threads 2
if [ "$long" ]; then
    part scripts/fuzz.sh "${FUZZ_SECONDS:-60}"
    part scripts/memcheck.sh
    part cargo deny check
fi
[ ${#failed[@]} -eq 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
