#!/usr/bin/env bash
# Stands between cargo and rustc: lints each target of this package, and the docs of its library, while rustc compiles it, as
# `cargo clippy -- -D warnings` and `cargo doc --no-deps` with `-D warnings` do. These check all other crates anew beforehand, a
# quarter of the time of compiling them.
#
# usage: RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/lint_and_compile.sh cargo test --no-run
set -euo pipefail
# Cargo also asks for the version, and compiles what is not linted.
[ -n "${CARGO_PRIMARY_PACKAGE:-}" ] || exec "$@"

rustc=$1 out=$(mktemp -d)
shift
trap 'rm -rf "$out"' EXIT
# What cargo says to rustc, but for what is written and where. It waits for messages of what is written.
said=() is_library= is_test=
arguments=("$@")
for ((i = 0; i < ${#arguments[@]}; i++)); do
    case ${arguments[i]} in
        --emit=*) continue ;;
        --out-dir) i=$((i + 1)); continue ;;
        --json=*) said+=(--json=diagnostic-rendered-ansi); continue ;;
        --test) is_test=yes ;;
        lib) is_library=yes ;;
    esac
    said+=("${arguments[i]}")
done

CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__ \
    clippy-driver "$rustc" "${said[@]}" --emit=metadata --out-dir "$out" 2>"$out/lints" &
checks=($!)
if [ -n "$is_library" ] && [ -z "$is_test" ]; then
    rustdoc "${said[@]}" -D warnings --out-dir "$out/doc" 2>"$out/docs" &
    checks+=($!)
fi
ended=0
"$rustc" "$@" || ended=$?
for check in "${checks[@]}"; do wait "$check" || ended=1; done
cat "$out"/lints "$out"/docs >&2 2>/dev/null || true
exit $ended
