#!/usr/bin/env bash
# Checks on a machine with an NVIDIA GPU that every path of PyTorch gives the same results as on the CPU, and measures it.
#
#   bash run_scripts/gpu_check.sh [--comm torch|horovod|mpi|elastic] [--device cpu] [--algorithms NAME...] [--output FOLDER]
#
# One rank alone, then two ranks, which share the GPU if there is only one: every algorithm with overlap, fragments,
# compression and placements of the center against the CPU's result; what users do besides (mixed precision, torch.compile,
# checkpoints, fully_shard); an elastic job that loses a worker; local steps, in which the host must not wait for the GPU (by PyTorch's profiler); the speed of
# updates, exchanges, wires, compiled steps, and of training with overlap.
# Needs a Python with torch (built with CUDA) and numpy, but no set-up: the project's environment if there is one, else the
# active one. Without --comm, ranks communicate over torch.distributed, then over Horovod and MPI where these are installed.
# Ends within eight minutes; writes FOLDER/gpu_check.json (default: results/gpu_check), a log for each job, and a table.
# --device cpu tries the check itself. Exits with 1 if something differs.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage_of "${BASH_SOURCE[0]}"
  exit 0
fi
NEEDED=torch
activate_for_jobs
export PYTHONPATH="$PROJECT_ROOT${PYTHONPATH:+:$PYTHONPATH}"
cd "$PROJECT_ROOT"
exec python3 -m tests.parallel.gpu_check "$@"
