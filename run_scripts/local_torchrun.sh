#!/usr/bin/env bash
# Starts a Python script on ranks of this machine with torchrun: without Horovod, over torch.distributed.
#
#   bash run_scripts/local_torchrun.sh RANKS SCRIPT.py [ARGUMENT...]
#
# Uses the project's virtual environment, or the active environment when there is none (run setup.sh once for either).
# The ranks meet at a free port. OMP_NUM_THREADS is set to the cores per rank, and HVD_PERIODIC_COMM to torch, unless they have
# a value. The exit code is the job's.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NEEDED=torch
prepare_local_job "${BASH_SOURCE[0]}" "$@"
export HVD_PERIODIC_COMM=${HVD_PERIODIC_COMM:-torch}
exec python3 -m torch.distributed.run --standalone --nproc-per-node "$RANKS" "${JOB[@]:1}"
