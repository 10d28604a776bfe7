#!/usr/bin/env bash
# Builds the documentation into site/, strictly: a broken link or anchor, or a page that no menu has, is an error.
#
#   bash run_scripts/docs.sh            # builds; the pages begin with site/index.html
#   bash run_scripts/docs.sh --serve    # shows them on http://127.0.0.1:8000, and follows changes
#
# Needs Python 3.11 or newer (python3, or $PYTHON) and a package index; no framework and no Horovod. The tools (MkDocs) go into
# an environment of their own in ~/.cache/hvd_periodic, or $XDG_CACHE_HOME. Further arguments go to MkDocs.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Makes the environment of the tools where requirements-docs.txt is not what it was made of.
provide_tools() {
  local folder=$1
  if cmp -s "$SCRIPTS/requirements-docs.txt" "$folder/complete"; then return; fi
  say "== Installing MkDocs into $folder (1 min)"
  rm -rf "$folder"
  mkdir -p "$(dirname "$folder")"
  "${PYTHON:-python3}" -m venv "$folder"
  "$folder/bin/python3" -m pip install --quiet --disable-pip-version-check --no-input \
    --requirement "$SCRIPTS/requirements-docs.txt"
  cp "$SCRIPTS/requirements-docs.txt" "$folder/complete"
}

main() {
  local command=(build --strict)
  case ${1:-} in
    -h | --help)
      usage_of "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --serve)
      command=(serve)
      shift
      ;;
  esac
  local folder="$CACHE/docs"
  provide_tools "$folder"
  cd "$PROJECT_ROOT"
  export NO_MKDOCS_2_WARNING=1
  "$folder/bin/python3" -m mkdocs "${command[@]}" "$@"
}

main "$@"
