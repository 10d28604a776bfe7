#!/usr/bin/env bash
# Sets the project up in a container image, as its root: what the Dockerfile and the Apptainer definition beside this file have in common.
#
#   bash run_scripts/containers/install.sh [OPTION...]
#
# For images of Debian 12, Ubuntu 24.04 or newer. Installs the system's Python, compiler and Open MPI, makes a virtual environment in
# /opt/venv ($VIRTUAL_ENV), and sets it up by setup.sh --use-current-env, with the options given. Where the image has NVIDIA's
# compiler, in /usr/local/cuda, Horovod gets operations on GPUs, over NCCL.

source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

PACKAGES=(python3 python3-venv python3-dev g++ make openmpi-bin libopenmpi-dev openssh-client)

main() {
  if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage_of "${BASH_SOURCE[0]}"
    exit 0
  fi
  ((EUID == 0)) || die 'system packages are installed by root: run this while an image is built'
  export VIRTUAL_ENV=${VIRTUAL_ENV:-/opt/venv} PIP_NO_CACHE_DIR=1 DEBIAN_FRONTEND=noninteractive
  export PATH="$VIRTUAL_ENV/bin:$PATH"

  apt-get update
  apt-get install --yes --no-install-recommends "${PACKAGES[@]}"
  rm -rf /var/lib/apt/lists/*

  if [[ -x /usr/local/cuda/bin/nvcc ]]; then
    export HOROVOD_GPU_OPERATIONS=${HOROVOD_GPU_OPERATIONS:-NCCL} HOROVOD_CUDA_HOME=/usr/local/cuda
  fi
  python3 -m venv "$VIRTUAL_ENV"
  XDG_CACHE_HOME=$(mktemp -d)
  export XDG_CACHE_HOME
  bash "$SCRIPTS/setup.sh" --use-current-env "$@"
  rm -rf "$XDG_CACHE_HOME"
}

main "$@"
