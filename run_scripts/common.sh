# shellcheck shell=bash disable=SC2034  # Variables are used where this is sourced.
# What the scripts beside this file share; sourced, never run.
set -euo pipefail

# The project, and its virtual environment ($HVD_PERIODIC_VENV names another place for it).
PROJECT_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
SCRIPTS="$PROJECT_ROOT/run_scripts"
VENV=$(realpath -m "${HVD_PERIODIC_VENV:-$PROJECT_ROOT/.venv}")
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/hvd_periodic"

# Set by --use-current-env and --without, and inherited by the scripts that a script starts.
USE_CURRENT_ENV=${HVD_PERIODIC_USE_CURRENT_ENV:-}
WITHOUT=${HVD_PERIODIC_WITHOUT:-}

say() { printf '%s\n' "$*"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the comment block at the top of script $1, without its comment signs: the scripts' --help.
usage_of() { sed -n '2,/^[^#]/ { /^#/ s/^# \{0,1\}//p }' "$1"; }

use_current_env() {
  USE_CURRENT_ENV=1
  export HVD_PERIODIC_USE_CURRENT_ENV=1
}

# Does without $1: Horovod, or a framework, of which the other one is enough.
go_without() {
  if [[ $1 != torch && $1 != tensorflow && $1 != horovod ]]; then
    die "--without takes tensorflow, torch or horovod. Received: ${1:-nothing}"
  fi
  if ! is_without "$1"; then WITHOUT+="${WITHOUT:+ }$1"; fi
  if is_without torch && is_without tensorflow; then
    die "--without takes one framework: without both torch and tensorflow, nothing is left to set up"
  fi
  export HVD_PERIODIC_WITHOUT=$WITHOUT
}

is_without() { [[ " $WITHOUT " == *" $1 "* ]]; }

# For quickstart.sh and test.sh: $1 is the script, the rest its arguments. Carries out --help and the options of setup.sh,
# which come first, and sets ARGUMENTS to what follows.
take_options() {
  local script=$1
  shift
  while :; do
    case ${1:-} in
      -h | --help)
        usage_of "$script"
        exit 0
        ;;
      --use-current-env) use_current_env ;;
      --without=*) go_without "${1#*=}" ;;
      --without)
        go_without "${2:-}"
        shift
        ;;
      *) break ;;
    esac
    shift
  done
  ARGUMENTS=("$@")
}

# Puts the programs of the environment to use first on PATH: the project's, or the active one. Waiting for messages, Open MPI
# would spin on cores that train; told to yield, it leaves them to whoever has something to do. Over TCP it would put large
# messages into the memory of others, which stalls every now and then; sent as messages, they go steadily.
activate() {
  export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
  export OMPI_MCA_btl_tcp_flags=${OMPI_MCA_btl_tcp_flags:-send,inplace}
  if [[ -n $USE_CURRENT_ENV ]]; then
    local scripts
    scripts=$(python3 -c 'import sysconfig; print(sysconfig.get_path("scripts"))') || die 'there is no python3 on PATH'
    [[ ":$PATH:" == *":$scripts:"* ]] || export PATH="$scripts:$PATH"
  else
    export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
    unset PYTHONHOME
  fi
}

# Sets STATE, the folder where setup.sh notes what it did, and BUILD_PATH, where the build tools are when they are not in the
# environment: beside an active one, whose own may be too new or too old.
set_state() {
  if [[ -n $USE_CURRENT_ENV ]]; then
    STATE="$CACHE/environments/$(python3 -c 'import sys; print(sys.prefix)' | sha256sum | cut -c 1-16)"
    BUILD_PATH="$STATE/build-tools"
  else
    STATE="$VENV/.hvd_periodic"
    BUILD_PATH=
  fi
}

# Runs a command with the build tools in reach.
with_build_tools() {
  if [[ -n $BUILD_PATH ]]; then
    PYTHONPATH="$BUILD_PATH${PYTHONPATH:+:$PYTHONPATH}" PATH="$BUILD_PATH/bin:$PATH" "$@"
  else
    "$@"
  fi
}

# The modules of which jobs need one; scripts that start jobs in one way name its module.
NEEDED='horovod mpi4py'

# Finds an environment in which jobs can run, without setting anything up.
activate_for_jobs() {
  if [[ -n $USE_CURRENT_ENV || ! -x $VENV/bin/python3 ]]; then
    use_current_env
  fi
  activate
  # shellcheck disable=SC2086  # Several words.
  python3 -c 'import importlib.util as u, sys; raise SystemExit(not any(map(u.find_spec, sys.argv[1:])))' $NEEDED 2>/dev/null ||
    die "there is no environment with ${NEEDED/ / or } yet; run: bash ${SCRIPTS#"$PWD"/}/setup.sh"
}

# What jobs need to start on this machine: Open MPI asks root to confirm (twice), and TensorFlow is told to be quiet.
export_job_variables() {
  if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}
}

# Sets MPIRUN to the command that starts $1 ranks here. Open MPI counts cores as slots and binds ranks to single cores:
# it is told that more ranks than cores are meant, and to leave the ranks' threads free.
set_mpirun() {
  MPIRUN=(mpirun -np "$1")
  if mpirun --version 2>/dev/null | grep -q 'Open MPI'; then
    MPIRUN+=(--bind-to none)
    if (($1 > $(nproc))); then
      MPIRUN+=(--oversubscribe)
    fi
  fi
}

# For ranks on this machine: sets DIRECTLY to words before their command, with which they write to the descriptors named (1, 2)
# of this script, as if no launcher were between. A launcher that passes output on is no terminal, and horovodrun begins each
# line with the rank.
write_directly() {
  local descriptor path commands=
  for descriptor in "$@"; do
    path="/proc/$$/fd/$descriptor"
    # To a file, all append: each of them has a position of its own there.
    if [[ -f $path ]]; then eval "exec $descriptor>>$path"; fi
    commands+="if { : >>$path; } 2>/dev/null; then exec $descriptor>>$path; fi; "
  done
  DIRECTLY=(bash -c "$commands"'exec "$@"' rank)
}

# For the local_*.sh launchers: $1 is the launcher's file, the rest its arguments. Sets RANKS and JOB, prepares the
# environment; prints the usage and exits with 2 on arguments that make no job.
prepare_local_job() {
  local launcher=$1
  shift
  if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage_of "$launcher"
    exit 0
  fi
  if (($# < 2)) || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    usage_of "$launcher" >&2
    exit 2
  fi
  [[ -f $2 ]] || {
    printf 'error: there is no file %s\n\n' "$2" >&2
    usage_of "$launcher" >&2
    exit 2
  }
  RANKS=$1
  JOB=(python3 "${@:2}")
  activate_for_jobs
  export_job_variables
  local threads=$(($(nproc) / RANKS))
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}

# Lets Python see other packages that benchmarks compare.
provide_peers() {
  activate_for_jobs
  set_state
  provide_beside peers 'accelerate and torchft'
  local packages
  packages=$(packages_of "$STATE/peers/bin/python3")
  export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
}

# Installs requirements-$1.txt, which brings $2, into an environment of its own, $STATE/$1, which sees the project's.
provide_beside() {
  local folder="$STATE/$1" requirements="$SCRIPTS/requirements-$1.txt" packages
  if cmp -s "$requirements" "$folder/complete"; then return; fi
  say "== Installing $2 into $folder (1 min)"
  rm -rf "$folder"
  python3 -m venv --without-pip "$folder"
  packages=$(packages_of "$folder/bin/python3")
  packages_of python3 >"$packages/project.pth"
  python3 -m pip --python "$folder/bin/python3" install --quiet --disable-pip-version-check --no-input \
    --requirement "$requirements"
  cp "$requirements" "$folder/complete"
}

# Prints where a Python has its packages.
packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Runs tests/benchmarks/$2.py with one rank on each of two emulated hosts, for script $1, with its arguments: the rate of
# the link, --peers if other packages take part, and those of the benchmark.
benchmark_on_two_hosts() {
  local script=$1 benchmark=$PROJECT_ROOT/tests/benchmarks/$2.py
  shift 2
  if [[ ${1:-} == -h || ${1:-} == --help || $# == 0 ]]; then
    usage_of "$script"
    exit $(($# == 0 ? 2 : 0))
  fi
  local rate=$1
  shift
  if [[ ${1:-} == --peers ]]; then
    provide_peers
    shift
  fi
  export OMP_NUM_THREADS=1 PYTHONPATH="$PROJECT_ROOT${PYTHONPATH:+:$PYTHONPATH}" HVD_PERIODIC_INTERFACE=eth0
  bash "$SCRIPTS/two_hosts.sh" "$rate" bash "$SCRIPTS/hosts_mpirun.sh" h1:1,h2:1 "$benchmark" "$@"
}
