#!/usr/bin/env bash
# The C++ compiler that Horovod 0.28.1 is built with: the real one ($HVD_PERIODIC_CXX), with five corrections.
#   1. C++20 instead of the C++11/14/17 that the source asks for: torch >= 2.1 and TensorFlow >= 2.16 need at least 17.
#   2. xla_mpi_ops.cc compiles to nothing: it includes headers that TensorFlow's wheel no longer ships, and holds only
#      the optional XLA path.
#   3. Libraries look for others in the environment they are built in ($HVD_PERIODIC_PREFIX, if set) relative to where they
#      lie themselves: <environment>/lib/pythonX.Y/site-packages/horovod/<framework>. So the built wheel works in any
#      environment.
#   4. <string> is included everywhere: a header of Horovod uses it without, which GCC 13 and later no longer forgive.
#   5. No debug information: to compile with it takes half as long again, and thirty times the room.
set -euo pipefail

arguments=(-include string)
for argument in "$@"; do
  case "$argument" in
    -std=c++11 | -std=c++14 | -std=c++17) arguments+=(-std=c++20) ;;
    -std=gnu++11 | -std=gnu++14 | -std=gnu++17) arguments+=(-std=gnu++20) ;;
    -g) ;;
    *xla_mpi_ops.cc) arguments+=(-UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=0 "$argument") ;;
    -Wl,-rpath,*"${HVD_PERIODIC_PREFIX:-/nowhere}"/* | -Wl,"${HVD_PERIODIC_PREFIX:-/nowhere}"/*)
      # shellcheck disable=SC2016  # The dynamic linker expands $ORIGIN.
      arguments+=("${argument//"${HVD_PERIODIC_PREFIX:-/nowhere}/"/'$ORIGIN/../../../../../'}")
      ;;
    *) arguments+=("$argument") ;;
  esac
done
# CXX may be several words, such as `ccache g++`.
read -r -a compiler <<<"${HVD_PERIODIC_CXX:-g++}"
exec "${compiler[@]}" "${arguments[@]}"
