#!/usr/bin/env bash
# Starts a Python script on ranks of this machine with mpirun.
#
#   bash run_scripts/local_mpirun.sh RANKS SCRIPT.py [ARGUMENT...]
#
# Uses the project's virtual environment, or the active environment when there is none (run setup.sh once for either).
# RANKS may exceed the number of cores. OMP_NUM_THREADS is set to the cores per rank unless it has a value.
# The exit code is the job's.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare_local_job "${BASH_SOURCE[0]}" "$@"
set_mpirun "$RANKS"
write_directly 2
exec "${MPIRUN[@]}" "${DIRECTLY[@]}" "${JOB[@]}"
