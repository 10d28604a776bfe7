#!/usr/bin/env bash
# Sets everything up, then trains the digits example with every way of exchanging, and compares them.
#
#   bash run_scripts/quickstart.sh [--use-current-env] [--without tensorflow] [ARGUMENT...]
#
# HVD_PERIODIC_NP is the number of ranks (default 2). Further arguments go to examples/torch_digits.py. The results stay in
# results/. The example is of PyTorch: --without tensorflow is enough for it. Both options: see setup.sh --help.

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

take_options "${BASH_SOURCE[0]}" "$@"

bash "$SCRIPTS/setup.sh"
cd "$PROJECT_ROOT"
ranks=${HVD_PERIODIC_NP:-2}
say "== torch_digits.py --algorithm all on $ranks ranks"
bash "$SCRIPTS/local_horovodrun.sh" "$ranks" examples/torch_digits.py --algorithm all --output results "${ARGUMENTS[@]}"
