#!/usr/bin/env bash
# Measures how well and how fast a small language model learns over a slow network, on two emulated hosts.
#
#   bash run_scripts/benchmark_language.sh RATE [ARGUMENT...]
#
#   bash run_scripts/benchmark_language.sh 1gbit
#   bash run_scripts/benchmark_language.sh 100mbit --json results.json --plot results.png
#   bash run_scripts/benchmark_language.sh 10mbit --period 50 --methods "no communication" "averaging, " SparseLoCo
#
# RATE is that of the link, see two_hosts.sh; further arguments go to the benchmark, which explains them with --help. Needs
# root, and two idle cores: one rank on each host. Prints loss, bytes and time; half an hour.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

benchmark_on_two_hosts "${BASH_SOURCE[0]}" language "$@"
