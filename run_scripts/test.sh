#!/usr/bin/env bash
# Sets everything up, runs the tests, then builds an sdist and a wheel and checks that they are what was tested.
#
#   bash run_scripts/test.sh [--use-current-env] [--without horovod] [--without tensorflow | --without torch] [--all] [ARGUMENT...]
#
# Runs tests of every kind, in about a quarter of an hour on two idle cores; with --all, also those that repeat them with other
# numbers (marked as thorough), which takes much longer; slow cores take twice as long. Further arguments go to pytest. Tests
# that need what --without leaves out are skipped. The options: see setup.sh --help.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Copies what belongs to the project to folder $1: the files git knows or would add, or, outside of git, all but the known
# by-products. So building leaves nothing behind in the tree.
copy_tree() {
  cd "$PROJECT_ROOT"
  mkdir -p "$1"
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    local file
    git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
      if [[ -e $file ]]; then printf '%s\0' "$file"; fi
    done | tar -c --null -T - | tar -x -C "$1"
  else
    tar -c --exclude=./.venv --exclude=./.venv-cuda --exclude=./build --exclude=./dist --exclude=./results --exclude=./site --exclude='*.egg-info' \
      --exclude=__pycache__ --exclude='./.*_cache' --exclude=./.hypothesis . | tar -x -C "$1"
  fi
}

# Installs distribution $1 into folder $2, without what it needs, and asks its command for its version, away from the tree.
install_into() {
  with_build_tools python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target "$2" "$1"
  (cd "$2" && PYTHONPATH=$2 python3 bin/hvdp --version)
}

# Builds an sdist from a copy of the tree, and a wheel from the sdist: both have to hold the files that were tested, to be
# installed, and to be imported away from the tree. With the wheel, two ranks of each framework train without Horovod.
test_distributions() {
  local work=$1 sdist wheel framework
  say '== an sdist built from the tree, and a wheel built from that: their files, their metadata, and imports'
  copy_tree "$work/tree"
  mkdir "$work/sdist"
  cd "$work/tree"
  with_build_tools python3 - "$work/sdist" >"$work/log" 2>&1 <<'EOF' || die "there is no sdist: $(tail -n 20 "$work/log")"
import sys
from setuptools import build_meta
build_meta.build_sdist(sys.argv[1])
EOF
  cd "$work"
  rm -rf "$work/tree/hvd_periodic.egg-info"
  sdist=$(echo "$work"/sdist/*.tar.gz)
  with_build_tools python3 -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir "$work/wheel" "$sdist"
  wheel=$(echo "$work"/wheel/*.whl)
  PYTHONPATH="$work/tree" python3 -m tests.distributions "$work/tree" "$sdist" "$wheel"
  install_into "$sdist" "$work/from_sdist"
  install_into "$wheel" "$work/site"
  diff -r --exclude=__pycache__ --exclude=RECORD --exclude=direct_url.json "$work/from_sdist" "$work/site" ||
    die 'pip installs another package from the sdist than from the wheel'
  mkdir "$work/run"
  cp -r "$work/tree/tests" "$work/tree/setup.cfg" "$work/run"
  cd "$work/run"
  export PYTHONPATH="$work/site"
  python3 - "$work/site" <<'EOF'
import pathlib, sys
import hvd_periodic
if not pathlib.Path(hvd_periodic.__file__).is_relative_to(sys.argv[1]):
    raise SystemExit(f"hvd_periodic comes from {hvd_periodic.__file__}, not from the wheel")
EOF
  python3 -m pytest tests/unit/test_imports.py
  set_mpirun 2
  for framework in torch tensorflow; do
    if ! python3 -c "import importlib.util as u; raise SystemExit(u.find_spec('$framework') is None)"; then continue; fi
    say "== two ranks of $framework, with the wheel and without Horovod"
    "${MPIRUN[@]}" python3 -c '
import runpy, sys
sys.modules["horovod"] = None
runpy.run_path(sys.argv.pop(1), run_name="__main__")
' "$SCRIPTS/verify.py" mpi "$framework" 2
  done
}

main() {
  take_options "${BASH_SOURCE[0]}" "$@"
  local tier=(-m 'not thorough')
  if [[ ${ARGUMENTS[0]:-} == --all ]]; then
    tier=()
    ARGUMENTS=("${ARGUMENTS[@]:1}")
  fi
  bash "$SCRIPTS/setup.sh"
  activate
  if python3 -c 'import torch' 2>/dev/null; then bash "$SCRIPTS/trainers.sh"; fi
  set_state
  export_job_variables
  export HVD_PERIODIC_TRAINERS="$STATE/trainers"
  # The ranks of a test share the cores: one thread each.
  export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=2

  cd "$PROJECT_ROOT"
  # Two at a time, each file by one: what leaves a core idle has company. Unit tests, which are short, come last.
  python3 -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${tier[@]}" "${ARGUMENTS[@]}"

  WORK=$(mktemp -d)
  trap 'rm -rf "$WORK"' EXIT
  test_distributions "$WORK"
}

main "$@"
