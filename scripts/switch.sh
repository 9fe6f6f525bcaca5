#!/usr/bin/env bash
# Plan, check, then serve a slug: the same as `launcher switch`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
(cd "$root" && . scripts/venv.sh && ensure_venv) && exec "$root/.venv/bin/launcher" switch "$@"
