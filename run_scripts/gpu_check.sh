#!/usr/bin/env bash
# Checks on a machine with an NVIDIA GPU that every path of PyTorch goes where it goes on the CPU.
#
#   bash run_scripts/gpu_check.sh [--device cpu] [--algorithms NAME...]
#
# One rank alone, then two ranks over MPI, which share the GPU if there is one only: every algorithm with overlap, fragments,
# compression and places of the center against the CPU's result; local steps, in which the host must not wait for the GPU
# (by PyTorch's profiler); the part of the memory bandwidth that local updates reach. --device cpu tries the check itself.
# The environment needs a torch with CUDA, and a Horovod built for it (setup.sh --use-current-env). Exits with 1 where
# something differs.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage_of "${BASH_SOURCE[0]}"
  exit 0
fi
export PYTHONPATH="$PROJECT_ROOT${PYTHONPATH:+:$PYTHONPATH}"
for ranks in 1 2; do
  prepare_local_job "${BASH_SOURCE[0]}" "$ranks" "$PROJECT_ROOT/tests/parallel/gpu_program.py" "$@"
  set_mpirun "$ranks"
  "${MPIRUN[@]}" "${JOB[@]}"
done
