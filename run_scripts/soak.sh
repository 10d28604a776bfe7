#!/usr/bin/env bash
# Exchanges many times in every mode on local ranks; fails where memory, file descriptors, threads or shared memory of a rank grow,
# or where something is left in /dev/shm. Run it before a release.
#
#   bash run_scripts/soak.sh RANKS [ARGUMENT...]
#
#   bash run_scripts/soak.sh 2                             # 20,000 exchanges in every mode of PyTorch: an hour on two idle cores
#   bash run_scripts/soak.sh 2 --framework tensorflow      # in compiled functions of TensorFlow
#   bash run_scripts/soak.sh 2 --exchanges 500 --mode averaging
#   HVD_PERIODIC_COMM=torch bash run_scripts/soak.sh 2     # over torch.distributed, started by torchrun
#
# Further arguments go to the program, which explains them with --help. Let no other MPI job run meanwhile: its files in /dev/shm
# would be taken for what is left.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Names what Open MPI and this package have in /dev/shm.
segments() { find /dev/shm -maxdepth 1 \( -name 'hvd_periodic.*' -o -name 'vader_segment.*' -o -name 'osc_*' \) | sort; }

export PYTHONPATH="$PROJECT_ROOT${PYTHONPATH:+:$PYTHONPATH}"
prepare_local_job "${BASH_SOURCE[0]}" "${1:-}" "$PROJECT_ROOT/tests/benchmarks/soak.py" "${@:2}"
set_mpirun "$RANKS"
if [[ ${HVD_PERIODIC_COMM:-} == torch ]]; then
  JOB=(python3 -m torch.distributed.run --standalone --nproc-per-node "$RANKS" "${JOB[@]:1}")
else
  JOB=("${MPIRUN[@]}" "${JOB[@]}")
fi
BEFORE=$(segments)
"${JOB[@]}"
LEFT=$(comm -13 <(echo "$BEFORE") <(segments))
[[ -z $LEFT ]] || die "left in /dev/shm: $LEFT"
