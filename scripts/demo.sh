#!/usr/bin/env bash
# From a fresh clone to an answer, without a GPU: makes .venv, builds llama.cpp when no llama-server is found, makes a
# small mixture-of-experts model, places its experts on two loopback "cards" and in host memory, asks it one question.
# Run it as often as you like: what is there is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
TARGET=demo/smol-moe-two-devices
QUESTION="In one sentence, what is a computer?"

. scripts/venv.sh
ensure_venv
PATH=$PWD/.venv/bin:$PATH

# Any llama-server will do that has an RPC server beside it: the two "cards" are RPC servers.
engine=$(
  python - <<'PY'
from launcher.errors import LauncherError
from launcher.facts.engine import find_engine

try:
    engine = find_engine()
    print(engine.path if engine.rpc_server else "")
except LauncherError:
    print("")
PY
)
if [[ -z $engine ]]; then
  installed=(python -c 'from launcher.engines.install import installed; print(installed() or "")')
  engine=$("${installed[@]}")
  if [[ -z $engine ]]; then
    echo "no llama-server with RPC found: building llama.cpp once (6 minutes on two fast cores, else up to 16)"
    launcher engine install
    engine=$("${installed[@]}")
  fi
  export LLAMA_SERVER=$engine
fi

model=$(python scripts/make_demo_model.py)

echo "\$ launcher plan $TARGET"
launcher plan "$TARGET"
echo
echo "\$ switch --yes $TARGET"
switch --yes "$TARGET"
echo

python - "$TARGET" "$QUESTION" <<'PY'
import sys

import httpx

from launcher.facts import slug

target, question = sys.argv[1:]
serve = slug.load(target).serve
endpoint = f"http://{serve.host}:{serve.port}/v1"
request = {
    "model": serve.alias,
    "messages": [{"role": "user", "content": question}],
    "temperature": 0,
    "max_tokens": 64,
}
answer = httpx.post(f"{endpoint}/chat/completions", json=request, timeout=600, trust_env=False)
answer.raise_for_status()
print(f"question  {question}")
print(f"answer    {answer.json()['choices'][0]['message']['content'].strip()}")
print(f"endpoint  {endpoint}   model {serve.alias}")
PY

cat <<EOF

It keeps running. To go on:
  source .venv/bin/activate
  launcher status              what runs, where, since when
  launcher logs -f             the engine's log
  launcher stop                end it, its two "cards" too
  launcher plan FILE.gguf      plan a model of your own: any shard, or its folder
model $model
EOF
