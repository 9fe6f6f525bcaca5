#!/usr/bin/env bash
# Download and verify what a slug needs: the same as `launcher setup`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
(cd "$root" && . scripts/venv.sh && ensure_venv) && exec "$root/.venv/bin/launcher" setup "$@"
