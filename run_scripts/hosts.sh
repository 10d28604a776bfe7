# shellcheck shell=bash disable=SC2034  # Variables are used where this is sourced.
# What the hosts_*.sh launchers beside this file share; sourced, never run.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Says what is wrong ($2), prints the usage of launcher $1, and exits with 2.
refuse() {
  printf 'error: %s\n\n' "$2" >&2
  usage_of "$1" >&2
  exit 2
}

# $1 is the launcher's file, the rest its arguments. Sets HOSTS (h0:4,h1:4), RANKS (the sum of slots) and JOB, exports what
# ranks need, and sets PASS to the names of the variables that are to reach other hosts.
prepare_hosts_job() {
  local launcher=$1 text entry entries name most=1
  shift
  if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage_of "$launcher"
    exit 0
  fi
  (($# > 1)) || refuse "$launcher" "hosts and a script are needed. Received: ${*:-nothing}"
  [[ ${HVD_PERIODIC_CORES:-1} =~ ^[1-9][0-9]*$ ]] ||
    refuse "$launcher" "HVD_PERIODIC_CORES is a number of cores. Received: $HVD_PERIODIC_CORES"

  if [[ -f $1 ]]; then
    text=$(sed -E 's/#.*//; s/[[:space:]]+slots[[:space:]]*=[[:space:]]*/:/' "$1")
  elif [[ -z $1 || $1 == *:* ]]; then
    text=$1
  else
    refuse "$launcher" "there is no hostfile $1; in a list, each host has its slots: $1:4"
  fi
  IFS=$', \t\r\n' read -r -d '' -a entries <<<"$text" || true
  ((${#entries[@]} > 0)) || refuse "$launcher" "there are no hosts in '$1'"
  HOSTS='' RANKS=0
  for entry in "${entries[@]}"; do
    [[ $entry =~ ^[[:alnum:]._-]+:([1-9][0-9]*)$ ]] ||
      refuse "$launcher" "a host and its slots are h0:4, or 'h0 slots=4' in a file. Received: $entry"
    HOSTS+="${HOSTS:+,}$entry"
    RANKS=$((RANKS + BASH_REMATCH[1]))
    most=$((BASH_REMATCH[1] > most ? BASH_REMATCH[1] : most))
  done

  local threads=$(($(nproc) / most))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${HVD_PERIODIC_CORES:-$((threads > 0 ? threads : 1))}}
  if [[ -n ${HVD_PERIODIC_INTERFACE:-} ]]; then
    export NCCL_SOCKET_IFNAME=$HVD_PERIODIC_INTERFACE HOROVOD_GLOO_IFACE=$HVD_PERIODIC_INTERFACE
  fi
  prepare_local_job "$launcher" "$RANKS" "${@:2}" # The rest is as on one host.

  local known="PATH LD_LIBRARY_PATH PYTHONPATH OMP_NUM_THREADS TF_CPP_MIN_LOG_LEVEL HVD_PERIODIC_COMM HVD_PERIODIC_TRANSPORT"
  PASS=()
  for name in $(compgen -e | LC_ALL=C sort); do
    if [[ " $known ${HVD_PERIODIC_PASS:-} " == *" $name "* || $name =~ ^(HOROVOD|NCCL|UCX|FI|MPIR_CVAR)_ ]]; then PASS+=("$name"); fi
  done
}

# Whether the MPI of the environment is Open MPI.
is_open_mpi() { [[ $(mpirun --version 2>/dev/null) == *'Open MPI'* ]]; }

# Becomes the command; under HVD_PERIODIC_DRY_RUN prints it.
launch() {
  if [[ -n ${HVD_PERIODIC_DRY_RUN:-} ]]; then
    exec python3 -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' "$@"
  fi
  command -v "$1" >/dev/null || die "there is no $1 on PATH"
  exec "$@"
}
