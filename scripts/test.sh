#!/usr/bin/env bash
# Everything the tests need (.venv with the development extras, the pinned engine, the demo model), then pytest.
#   scripts/test.sh [PYTEST ARGUMENTS]        LLAMA_SERVER_UNDER_TEST=/path/to/llama-server tests another engine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

. scripts/venv.sh
ensure_venv dev
PATH=$PWD/.venv/bin:$PATH

if [[ -z ${LLAMA_SERVER_UNDER_TEST:-} ]]; then
  installed=(python -c 'from launcher.engines.install import installed; print(installed() or "")')
  LLAMA_SERVER_UNDER_TEST=$("${installed[@]}")
  if [[ -z $LLAMA_SERVER_UNDER_TEST ]]; then
    launcher engine install >&2
    LLAMA_SERVER_UNDER_TEST=$("${installed[@]}")
  fi
fi
LAUNCHER_DEMO_MODEL=$(python scripts/make_demo_model.py)
export LLAMA_SERVER_UNDER_TEST LAUNCHER_DEMO_MODEL
export LAUNCHER_REQUIRE_ENGINE=1
exec python -m pytest "$@"
