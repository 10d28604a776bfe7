#!/usr/bin/env bash
# Starts a Python script on ranks of several hosts with Open MPI's mpirun.
#
#   bash run_scripts/hosts_mpirun.sh HOSTS SCRIPT.py [ARGUMENT...]
#
# HOSTS is a list, h0:4,h1:4, or a file with a line for each host, `h0 slots=4` or `h0:4`. A rank is started for each slot, host by
# host. All hosts have the project, its environment and the script at the same paths, and ssh reaches them without a password.
#
#   HVD_PERIODIC_CORES       pins each rank to so many cores of its own (default: ranks are not pinned)
#   HVD_PERIODIC_INTERFACE   the network interface between hosts (eth0, ib0), where MPI, NCCL and Gloo should not choose
#   HVD_PERIODIC_PASS        more variables that ranks need, separated by spaces. Passed on anyway: PATH, LD_LIBRARY_PATH,
#                            PYTHONPATH, OMP_NUM_THREADS, HVD_PERIODIC_COMM, HVD_PERIODIC_TRANSPORT, HOROVOD_*, NCCL_*, UCX_*,
#                            FI_*, MPIR_CVAR_*
#   HVD_PERIODIC_DRY_RUN=1   prints the command and starts nothing
#   OMPI_MCA_...             Open MPI's own parameters; mpirun passes them on
#
# OMP_NUM_THREADS is set to the cores per rank unless it has a value, as if all hosts had as many as this one. For GPUs, give each
# host as many slots as it has GPUs; the script takes GPU hvd.local_rank(). Where an MPI with UCX hangs or crashes beside
# NCCL, OMPI_MCA_pml=ob1 makes it do without UCX. The exit code is the job's.

source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

prepare_hosts_job "${BASH_SOURCE[0]}" "$@"
is_open_mpi || die "the mpirun on PATH is not Open MPI's; for MPICH there is ${SCRIPTS#"$PWD"/}/hosts_mpich.sh"

# Called by its path, mpirun looks for Open MPI at the same path on other hosts; what ssh starts there has no such PATH.
COMMAND=("$(command -v mpirun)" -np "$RANKS" -H "$HOSTS")
if [[ -n ${HVD_PERIODIC_CORES:-} ]]; then
  COMMAND+=(--map-by "slot:PE=$HVD_PERIODIC_CORES" --bind-to core)
else
  COMMAND+=(--map-by slot --bind-to none)
fi
if [[ -n ${HVD_PERIODIC_INTERFACE:-} ]]; then
  COMMAND+=(--mca btl_tcp_if_include "$HVD_PERIODIC_INTERFACE" --mca oob_tcp_if_include "$HVD_PERIODIC_INTERFACE")
fi
for name in "${PASS[@]}"; do COMMAND+=(-x "$name"); done
launch "${COMMAND[@]}" "${JOB[@]}"
