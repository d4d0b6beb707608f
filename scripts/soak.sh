#!/usr/bin/env bash
# Breaks runs on purpose and holds what is left: every fault of tests/README.md, and runs that are killed at random
# moments and resumed until they are done.
#
# usage: scripts/soak.sh [KILLS [SEED]]     kills of each of the three kinds of run (default 100), and which moments
#
# As root the tests with a small disk and with process 1 of a container run too; they say so where they are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
export LORA_TRAIN_SOAK_KILLS="${1:-100}" LORA_TRAIN_SOAK_SEED="${2:-1}"
cargo test --release --locked --test disks --test interrupts --test long --test mistakes --test numbers --test room \
    --test secrets --test soak -- --nocapture --test-threads 1
cargo test --release --locked --lib -- checkpoint metrics run:: train::watchdog data::loader
