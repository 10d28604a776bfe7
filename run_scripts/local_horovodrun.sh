#!/usr/bin/env bash
# Starts a Python script on ranks of this machine with horovodrun.
#
#   bash run_scripts/local_horovodrun.sh RANKS SCRIPT.py [ARGUMENT...]
#
# Uses the project's virtual environment, or the active environment when there is none (run setup.sh once for either).
# RANKS may exceed the number of cores. OMP_NUM_THREADS is set to the cores per rank unless it has a value.
# HVD_PERIODIC_CONTROLLER=mpi starts the ranks through MPI instead of Gloo. The exit code is the job's.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

NEEDED=horovod
prepare_local_job "${BASH_SOURCE[0]}" "$@"
write_directly 1 2

# horovodrun itself exits with 1 whatever a rank exits with. So each rank runs in a shell that leaves its exit code in a
# file; `set -C` lets only the first one do so: the others fail because horovodrun ends them.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HVD_PERIODIC_EXIT_CODE="$folder/code"
# shellcheck disable=SC2016  # The rank's shell expands these.
run='"$@" || { code=$?; set -C; echo "$code" 2>/dev/null >"$HVD_PERIODIC_EXIT_CODE"; exit "$code"; }'

# Without --gloo or --mpi, horovodrun first finds out what Horovod was built with, in processes that each import TensorFlow
# (5 s apiece). Gloo is the default: it needs no further program, and it is what elastic Horovod runs on.
# That import logs twice, before any log level applies, that oneDNN is on. For horovodrun alone it is off; the ranks get what
# the user has set.
rank="if [[ -n \${HVD_PERIODIC_ONEDNN+set} ]]; then export TF_ENABLE_ONEDNN_OPTS=\$HVD_PERIODIC_ONEDNN; "
rank+="else unset TF_ENABLE_ONEDNN_OPTS; fi; $run"
if [[ -n ${TF_ENABLE_ONEDNN_OPTS+set} ]]; then export HVD_PERIODIC_ONEDNN=$TF_ENABLE_ONEDNN_OPTS; fi
export TF_ENABLE_ONEDNN_OPTS=0

code=0
horovodrun "--${HVD_PERIODIC_CONTROLLER:-gloo}" -np "$RANKS" bash -c "$rank" rank "${DIRECTLY[@]}" "${JOB[@]}" || code=$?
if ((code != 0)) && [[ -s $HVD_PERIODIC_EXIT_CODE ]]; then
  code=$(<"$HVD_PERIODIC_EXIT_CODE")
fi
exit "$code"
