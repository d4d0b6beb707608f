#!/usr/bin/env bash
# Fuzzes the readers of files and answers from others: the targets of tests/hostile, under libFuzzer.
#
#   scripts/fuzz.sh [SECONDS_PER_TARGET [TARGET...]]    default: 60, all targets
#   scripts/fuzz.sh --totals                            inputs tried, hours and findings of all runs so far
#   scripts/fuzz.sh --keep                              makes fuzz/corpus.tar.gz of the inputs worth keeping
#
# Starts from fuzz/corpus, from fuzz/corpus.tar.gz (the fewest inputs of longer runs that reach the same code as all of
# them), and from the inputs of earlier runs here. Builds, corpora, findings and the record of runs are in
# $LORA_TRAIN_FUZZ (default: fuzz/target). Exit code 1 if an input panics, takes more than 20 seconds, or takes far more
# memory than its length; the input is then in findings/ and its file name is printed.
set -euo pipefail
cd "$(dirname "$0")/.."

state="${LORA_TRAIN_FUZZ:-fuzz/target}"
mkdir -p "$state/findings"
state="$(cd "$state" && pwd)"
record="$state/runs.tsv"

totals() {
    awk -F '\t' '
        { inputs[$2] += $4; seconds[$2] += $3; found[$2] += $5; all += $4; time += $3; finds += $5 }
        END {
            printf "%-12s %14s %8s %8s\n", "target", "inputs", "hours", "findings"
            for (name in inputs) printf "%-12s %14d %8.2f %8d\n", name, inputs[name], seconds[name] / 3600, found[name] | "sort"
            close("sort")
            printf "%-12s %14d %8.2f %8d\n", "all", all, time / 3600, finds
        }' "$record"
}

if [ "${1:-}" = --totals ]; then
    totals
    exit
fi

host="$(rustc -vV | sed -n 's/^host: //p')"
limits=(-rss_limit_mb=2048 -max_len=16384)

keep() {
    local target minimal="$state/minimal"
    rm -rf "$minimal"
    for target in "$state"/corpus/*/; do
        target="$(basename "$target")"
        mkdir -p "$minimal/$target"
        "$state/$host/release/$target" -set_cover_merge=1 -timeout=60 "${limits[@]}" \
            "$minimal/$target" "fuzz/corpus/$target" "$state/corpus/$target" >"$state/$target.merge.log" 2>&1
        echo "$target: $(find "$minimal/$target" -type f | wc -l) of $(find "$state/corpus/$target" -type f | wc -l)"
    done
    tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - -C "$minimal" . | gzip -9n >fuzz/corpus.tar.gz
}

if [ "${1:-}" = --keep ]; then
    keep
    exit
fi

seconds="${1:-60}"
shift || true
targets=("$@")
if [ ${#targets[@]} -eq 0 ]; then
    for file in fuzz/fuzz_targets/*.rs; do targets+=("$(basename "$file" .rs)"); done
fi

cargo fuzz --version >/dev/null 2>&1 || cargo install cargo-fuzz --locked --version 0.13.2
# No sanitizer, so that the stable compiler suffices: the code is safe except for the kernels, which no target reaches, and
# our own allocator watches memory. A target folder given to cargo is the trainer's, with other flags.
env -u CARGO_TARGET_DIR cargo fuzz build --sanitizer none --strip-dead-code --target-dir "$state"
mkdir -p "$state/corpus"
if [ ! "$state/corpus/.unpacked" -nt fuzz/corpus.tar.gz ]; then
    tar -xzf fuzz/corpus.tar.gz -C "$state/corpus"
    touch "$state/corpus/.unpacked"
fi

failed=0
for target in "${targets[@]}"; do
    corpus="$state/corpus/$target"
    log="$state/$target.log"
    mkdir -p "$corpus" "fuzz/corpus/$target"
    start=$SECONDS
    findings=0
    "$state/$host/release/$target" -max_total_time="$seconds" -timeout=20 "${limits[@]}" \
        -print_final_stats=1 -artifact_prefix="$state/findings/$target-" "$corpus" "fuzz/corpus/$target" >"$log" 2>&1 ||
        findings=1
    inputs="$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)"
    # If an input ends the process at once, there are no statistics.
    [ -n "$inputs" ] || inputs="$(sed -n 's/^#\([0-9]*\).*/\1/p' "$log" | tail -n 1)"
    printf '%s\t%s\t%d\t%d\t%d\n' "$(date -u +%FT%TZ)" "$target" $((SECONDS - start)) "${inputs:-0}" "$findings" >>"$record"
    echo "$target: ${inputs:-0} inputs in $((SECONDS - start)) s"
    if [ "$findings" -ne 0 ]; then
        failed=1
        tail -n 40 "$log" | grep -v '^stat::'
    fi
done
[ "$failed" -eq 0 ] || { echo "inputs that were found are in $state/findings"; exit 1; }
