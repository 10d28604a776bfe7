#!/usr/bin/env bash
# Sets everything up, then trains the digits example with every way of exchanging, and compares them.
#
#   bash run_scripts/quickstart.sh [--use-current-env] [--without horovod] [--without tensorflow] [ARGUMENT...]
#
# HVD_PERIODIC_NP is the number of ranks (default 2). HVD_PERIODIC_COMM=horovod, torch or mpi is what they exchange over (default:
# Horovod, started by horovodrun; --without horovod: MPI, started by mpirun). Further arguments go to
# examples/torch_digits.py. The results stay in results/. The example is of PyTorch: --without tensorflow is enough for it.
# The options: see setup.sh --help.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

take_options "${BASH_SOURCE[0]}" "$@"

if is_without horovod; then comm=mpi; else comm=horovod; fi
export HVD_PERIODIC_COMM=${HVD_PERIODIC_COMM:-$comm}
case ${HVD_PERIODIC_COMM,,} in
  horovod) launcher=local_horovodrun.sh ;;
  torch) launcher=local_torchrun.sh ;;
  mpi) launcher=local_mpirun.sh ;;
  *) die "HVD_PERIODIC_COMM must be horovod, torch or mpi. Received: $HVD_PERIODIC_COMM" ;;
esac

bash "$SCRIPTS/setup.sh"
cd "$PROJECT_ROOT"
ranks=${HVD_PERIODIC_NP:-2}
say "== torch_digits.py --algorithm all on $ranks ranks, over $HVD_PERIODIC_COMM"
bash "$SCRIPTS/$launcher" "$ranks" examples/torch_digits.py --algorithm all --output results "${ARGUMENTS[@]}"
