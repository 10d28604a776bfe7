#!/usr/bin/env bash
# Checks on a machine with an NVIDIA GPU that every path of PyTorch goes where it goes on the CPU.
#
#   bash run_scripts/gpu_check.sh [--device cpu] [--algorithms NAME...]
#
# One rank alone, then two ranks, which share the GPU if there is one only: every algorithm with overlap, fragments,
# compression and places of the center against the CPU's result; what users do besides (mixed precision, torch.compile,
# checkpoints, fully_shard); local steps, in which the host must not wait for the GPU (by PyTorch's profiler); the part of
# the memory bandwidth that local updates and exchanges reach. --device cpu tries the check itself.
# The environment needs a torch with CUDA. Ranks are those of a Horovod built for it (setup.sh --use-current-env), over
# MPI. Without Horovod for torch, or with HVD_PERIODIC_COMM=torch, they are those of torchrun: over NCCL, or over Gloo where
# they share a GPU, which NCCL refuses. Exits with 1 where something differs.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage_of "${BASH_SOURCE[0]}"
  exit 0
fi
NEEDED=torch
activate_for_jobs
launcher=local_mpirun.sh
if [[ ${HVD_PERIODIC_COMM:-} == torch ]] || ! python3 -c 'import horovod.torch' 2>/dev/null; then
  launcher=local_torchrun.sh
fi
export PYTHONPATH="$PROJECT_ROOT${PYTHONPATH:+:$PYTHONPATH}"
code=0
for ranks in 1 2; do
  bash "$SCRIPTS/$launcher" "$ranks" "$PROJECT_ROOT/tests/parallel/gpu_program.py" "$@" || code=1
done
exit "$code"
