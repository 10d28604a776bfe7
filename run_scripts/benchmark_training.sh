#!/usr/bin/env bash
# Measures training over a slow network: ours and other methods side by side, on two emulated hosts.
#
#   bash run_scripts/benchmark_training.sh RATE [--peers] [ARGUMENT...]
#
#   bash run_scripts/benchmark_training.sh 1gbit
#   bash run_scripts/benchmark_training.sh 100mbit --peers --period 50 --json results.json --plot results.png
#
# RATE is that of the link, see two_hosts.sh. With --peers, accelerate's LocalSGD and torchft's LocalSGD, DiLoCo and Streaming
# DiLoCo take part; they are installed once, into an environment of their own. Further arguments go to the benchmark, which
# explains them with --help. Needs root, and two idle cores: one rank on each host. Prints steps per second as parts of
# those without communication.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

benchmark_on_two_hosts "${BASH_SOURCE[0]}" training "$@"
