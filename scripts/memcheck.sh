#!/usr/bin/env bash
# Runs the tests of the modules with `unsafe` code under Valgrind's memcheck: reads and writes out of bounds, and results
# that depend on memory that was never written.
#
#   scripts/memcheck.sh [SECONDS_PER_TEST [FILTER...]]    default: 300, the modules with `unsafe` code
#
# In place of Miri, which is not part of the stable toolchain and knows neither the kernels' vector instructions nor the
# system calls of the other modules. Valgrind offers the kernels AVX2, not AVX-512: of each kernel, the AVX2 and the plain
# version run. A test that takes longer than the limit (some compare millions of numbers) is told, and no failure. Needs
# `valgrind`. Ends with 1 where a test fails or memory is misused.
set -uo pipefail
cd "$(dirname "$0")/.."

limit="${1:-300}"
shift || true
filters=("$@")
[ ${#filters[@]} -gt 0 ] || filters=(ops::cpu budget model::weights telemetry device train::stop metrics::dashboard)

binary="$(cargo test --release --locked --lib --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*lora_train-[^"]*\)".*/\1/p' | tail -n 1)"
[ -x "$binary" ] || { echo "the tests could not be built: cargo test --release --lib --no-run says why"; exit 1; }
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

passed=0 slow=0 failed=0
for filter in "${filters[@]}"; do
    "$binary" --list 2>/dev/null | grep -q "^$filter::" || { echo "no test in $filter"; failed=$((failed + 1)); }
    while read -r test; do
        timeout "$limit" valgrind --quiet --error-exitcode=9 --num-callers=16 \
            "$binary" --exact "$test" --test-threads=1 >"$log" 2>&1
        case $? in
            0) passed=$((passed + 1)) ;;
            124) slow=$((slow + 1)); echo "not to its end in $limit s: $test" ;;
            *) failed=$((failed + 1)); echo "FAILED: $test"; tail -n 40 "$log" ;;
        esac
    done < <("$binary" --list 2>/dev/null | sed -n "s/^\($filter::.*\): test\$/\1/p")
done
echo "$passed tests without an error, $slow not to their end, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
