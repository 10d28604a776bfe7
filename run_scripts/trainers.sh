#!/usr/bin/env bash
# Installs the trainers that hvd_periodic.torch works with (Lightning, transformers, accelerate, Ignite), peft, torchdata and numba into
# an environment of their own, which sees the project's: their tests and examples run there.
#
#   bash run_scripts/trainers.sh
#   bash run_scripts/trainers.sh COMMAND [ARGUMENT...]     # then runs a command with them
#
#   bash run_scripts/trainers.sh mpirun -np 2 python3 examples/lightning_digits.py
#
# test.sh does it by itself. Nothing is reported to or loaded from a hub of models.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

main() {
  if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage_of "${BASH_SOURCE[0]}"
    exit 0
  fi
  NEEDED=torch
  activate_for_jobs
  set_state
  provide_beside trainers 'Lightning, transformers, accelerate, peft, Ignite, torchdata and numba'
  (($# > 0)) || exit 0
  local packages
  packages=$(packages_of "$STATE/trainers/bin/python3")
  export_job_variables
  export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
  exec "$@"
}

main "$@"
