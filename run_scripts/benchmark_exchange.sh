#!/usr/bin/env bash
# Measures what an exchange costs on this machine: ours, and Horovod's own ways to sum the same tensors.
#
#   bash run_scripts/benchmark_exchange.sh RANKS [ARGUMENT...]
#
#   bash run_scripts/benchmark_exchange.sh 2
#   bash run_scripts/benchmark_exchange.sh 4 --model 20-thousand --json results.json --plot results.png
#
# RANKS should not exceed the idle cores. Further arguments go to the benchmark, which explains them with --help: sizes from 10
# thousand to 100 million parameters (for which a machine may have memory for some exchanges only: --exchanges), PyTorch or
# TensorFlow. Prints times, and their ratios to one flat allreduce.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

export PYTHONPATH="$PROJECT_ROOT${PYTHONPATH:+:$PYTHONPATH}"
prepare_local_job "${BASH_SOURCE[0]}" "${1:-}" "$PROJECT_ROOT/tests/benchmarks/exchange.py" "${@:2}"
set_mpirun "$RANKS"
exec "${MPIRUN[@]}" "${JOB[@]}"
