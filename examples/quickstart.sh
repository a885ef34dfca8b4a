#!/usr/bin/env bash
# From a clean clone to a trained model: sets up .venv, then trains the toy language model on this machine's device.
# Arguments go to examples/train_lm.py. Decides nothing that qa/setup.sh or train_lm.py decides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash qa/setup.sh
exec .venv/bin/python examples/train_lm.py --preset toy "$@"
