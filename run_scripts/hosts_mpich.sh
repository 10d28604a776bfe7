#!/usr/bin/env bash
# Starts a Python script on ranks of several hosts with MPICH's mpiexec (Hydra).
#
#   bash run_scripts/hosts_mpich.sh HOSTS SCRIPT.py [ARGUMENT...]
#
# HOSTS and the HVD_PERIODIC_... variables are those of hosts_mpirun.sh; see its --help.
# HVD_PERIODIC_INTERFACE is where Hydra and NCCL connect; MPICH's own messages follow FI_TCP_IFACE (libfabric) or
# UCX_NET_DEVICES (UCX).
# Horovod has to be built with MPICH: setup.sh --use-current-env does so where MPICH is the active environment's MPI. Ranks of
# a Horovod that was built with Open MPI would each train alone, so that is refused. The exit code is the job's.

source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

prepare_hosts_job "${BASH_SOURCE[0]}" "$@"
if [[ -z ${HVD_PERIODIC_DRY_RUN:-} ]] && is_open_mpi; then
  die "the MPI of this environment is Open MPI, whose ranks would each run alone; use ${SCRIPTS#"$PWD"/}/hosts_mpirun.sh"
fi

COMMAND=(mpiexec.hydra -n "$RANKS" -hosts "$HOSTS" -bind-to "${HVD_PERIODIC_CORES:+core:}${HVD_PERIODIC_CORES:-none}")
if [[ -n ${HVD_PERIODIC_INTERFACE:-} ]]; then
  COMMAND+=(-iface "$HVD_PERIODIC_INTERFACE")
fi
COMMAND+=(-genvlist "$(IFS=,; say "${PASS[*]}")")
launch "${COMMAND[@]}" "${JOB[@]}"
