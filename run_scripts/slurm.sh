# shellcheck shell=bash
# What the batch scripts beside this file share; sourced, never run.
set +o posix # sbatch passes POSIXLY_CORRECT on, with which a status is forgotten once it has been waited for.
source "${SLURM_SUBMIT_DIR:?}/run_scripts/common.sh"
activate

REQUEUE_CODE=75 # of a script that has saved and wants to go on: EX_TEMPFAIL of sysexits.h

# Runs a launcher until its ranks end. The warning before the time limit (SIGUSR1) reaches them as SIGUSR1, and so does the one of
# a preemption (SIGTERM). Queues the job again if they end with REQUEUE_CODE, or without error when a rank has left the file
# REQUEUE_NOTE; otherwise the exit code is theirs.
run_and_requeue() {
  local launcher code stopped=
  "$@" &
  launcher=$!
  trap 'stopped=1; kill -USR1 "$launcher" 2>/dev/null || true' USR1 TERM
  # wait returns at every trapped signal, with the number of the signal, whether the launcher has ended since or not.
  while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" || true; done
  code=0
  wait "$launcher" || code=$?
  if [[ -e ${REQUEUE_NOTE:-} ]]; then
    rm -f "$REQUEUE_NOTE"
    ((code > 0)) || code=$REQUEUE_CODE
  fi
  if ((code == REQUEUE_CODE)); then
    say "exit code $code${stopped:+ after a warning}: queueing job $SLURM_JOB_ID again"
    scontrol requeue "$SLURM_JOB_ID" || say "job $SLURM_JOB_ID cannot be queued again"
  fi
  exit "$code"
}
