#!/usr/bin/env bash
# Measures training over a slow network: ours and other methods side by side, on two emulated hosts.
#
#   bash run_scripts/benchmark_training.sh RATE [ARGUMENT...]
#
#   bash run_scripts/benchmark_training.sh 1gbit
#   bash run_scripts/benchmark_training.sh 100mbit --period 50 --json results.json --plot results.png
#
# RATE is that of the link, see two_hosts.sh; further arguments go to the benchmark, which explains them with --help. Needs
# root, and two idle cores: one rank on each host. Prints steps per second as parts of those without communication.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} == -h || ${1:-} == --help || $# == 0 ]]; then
  usage_of "${BASH_SOURCE[0]}"
  exit $(($# == 0 ? 2 : 0))
fi
export OMP_NUM_THREADS=1 PYTHONPATH="$PROJECT_ROOT${PYTHONPATH:+:$PYTHONPATH}" HVD_PERIODIC_INTERFACE=eth0
bash "$SCRIPTS/two_hosts.sh" "$1" \
  bash "$SCRIPTS/hosts_mpirun.sh" h1:1,h2:1 "$PROJECT_ROOT/tests/benchmarks/training.py" "${@:2}"
