#!/usr/bin/env bash
# Runs the tests of the modules with `unsafe` code under Valgrind's memcheck, which finds reads and writes out of bounds,
# and results that depend on uninitialised memory.
#
#   scripts/memcheck.sh [SECONDS_PER_TEST [FILTER...]]    default: 300, the modules with `unsafe` code
#
# It replaces Miri, which is not part of the stable toolchain and supports neither the kernels' vector instructions nor the
# system calls of the other modules. Valgrind supports AVX2, not AVX-512, so the AVX2 and the plain version of each kernel
# run. Exit code 1 if memory is misused. Reported, but no failure: a test that exceeds the time limit (some compare
# millions of numbers), and a failed assertion, because times differ under Valgrind. Needs `valgrind`.
set -uo pipefail
cd "$(dirname "$0")/.."

limit="${1:-300}"
shift || true
filters=("$@")
[ ${#filters[@]} -gt 0 ] || filters=(ops::cpu allocator model::weights telemetry device train::stop metrics::dashboard)

binary="$(cargo test --release --locked --lib --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*lora_train-[^"]*\)".*/\1/p' | tail -n 1)"
[ -x "$binary" ] || { echo "the tests could not be built: cargo test --release --lib --no-run says why"; exit 1; }
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

passed=0 slow=0 own=0 misused=0
for filter in "${filters[@]}"; do
    "$binary" --list 2>/dev/null | grep -q "^$filter::" || { echo "no test in $filter"; exit 1; }
    while read -r test; do
        timeout "$limit" valgrind --quiet --error-exitcode=9 --num-callers=16 \
            "$binary" --exact "$test" --test-threads=1 >"$log" 2>&1 </dev/null
        case $? in
            0) passed=$((passed + 1)) ;;
            124) slow=$((slow + 1)); echo "not to its end in $limit s: $test" ;;
            9) misused=$((misused + 1)); echo "MEMORY MISUSED: $test"; grep '^==' "$log" | head -n 40 ;;
            *) own=$((own + 1)); echo "its own assertion does not hold: $test" ;;
        esac
    done < <("$binary" --list 2>/dev/null | sed -n "s/^\($filter::.*\): test\$/\1/p")
done
echo "$passed tests without an error, $slow not to their end, $own with an assertion of their own, $misused misuse memory"
[ "$misused" -eq 0 ] && [ "$passed" -gt 0 ]
