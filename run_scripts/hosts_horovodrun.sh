#!/usr/bin/env bash
# Starts a Python script on ranks of several hosts with horovodrun.
#
#   bash run_scripts/hosts_horovodrun.sh HOSTS SCRIPT.py [ARGUMENT...]
#
# HOSTS and the HVD_PERIODIC_... variables are those of hosts_mpirun.sh; see its --help. horovodrun passes all variables on
# but CUDA_VISIBLE_DEVICES. HVD_PERIODIC_CONTROLLER=mpi starts the ranks through MPI instead of Gloo; only MPI pins them.
# Over Gloo, the exit code is 1 whatever a rank fails with.

source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

NEEDED=horovod
prepare_hosts_job "${BASH_SOURCE[0]}" "$@"
controller=${HVD_PERIODIC_CONTROLLER:-gloo}
if [[ -n ${HVD_PERIODIC_CORES:-} && $controller == gloo ]]; then
  refuse "${BASH_SOURCE[0]}" "Gloo pins no ranks: set HVD_PERIODIC_CONTROLLER=mpi, or unset HVD_PERIODIC_CORES"
fi

COMMAND=(horovodrun "--$controller" -np "$RANKS" -H "$HOSTS")
if [[ -n ${HVD_PERIODIC_INTERFACE:-} ]]; then
  COMMAND+=(--network-interface "$HVD_PERIODIC_INTERFACE")
fi
if [[ $controller == mpi ]] && is_open_mpi; then
  # horovodrun calls mpirun by its name; see hosts_mpirun.sh.
  mpirun=$(command -v mpirun)
  arguments="--prefix ${mpirun%/bin/mpirun}${HVD_PERIODIC_INTERFACE:+ --mca oob_tcp_if_include $HVD_PERIODIC_INTERFACE}"
  COMMAND+=(--mpi-args="$arguments")
  if [[ -n ${HVD_PERIODIC_CORES:-} ]]; then
    COMMAND+=(--binding-args="--map-by slot:PE=$HVD_PERIODIC_CORES --bind-to core")
  fi
fi
launch "${COMMAND[@]}" "${JOB[@]}"
