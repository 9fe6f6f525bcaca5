"""What the real engine makes of random weights: finite logits that depend on the prompt, for every kind of layer."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher.facts.engine import clean_env
from scripts import fill_model
from tests.engine.ports import free_port
from tests.replicas import make_replica, make_tiny

pytestmark = pytest.mark.engine

SPEC_FILES = Path(make_replica.__file__).parent / "specs"
TINY = {s["name"]: s for s in make_tiny.TINY}
# The last three are small cuts of real models: recurrent layers, K-quants, and two-bit types.
MODELS = (
    "tiny-qwen3moe", "tiny-gpt-oss", "tiny-deepseek4", "tiny-glm4moe",
    "qwen3-next-80b-a3b-split-Q4_K_M", "qwen3-30b-a3b-Q4_K_M", "deepseek-v4-flash-UD-IQ2_XXS",
)  # fmt: skip
PROMPTS = ("the sun and the moon were late", "one two three four five")
N_PREDICT = 8


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_reads_finite_logits_from_random_weights(engine_path: Path, tmp_path: Path, name: str) -> None:
    spec = TINY.get(name) or make_replica.scale_tiny(make_replica.load_spec(str(SPEC_FILES / f"{name}.yaml")))
    shards = [make_replica.tensors_of(spec)]
    written = make_replica.write(str(tmp_path), spec["name"], make_replica.kv_of(spec), shards)
    path = written["files"][0]["path"]
    fill_model.fill(path)
    answers = completions(engine_path, path, tmp_path / "log")
    for steps in answers:
        assert len(steps) >= N_PREDICT - 2  # the server keeps back what ends in half a character
        told = [p["logprob"] for step in steps for p in step["top_logprobs"]]
        assert all(isinstance(p, float) and math.isfinite(p) and p <= 0 for p in told)
        assert all(step["top_logprobs"][0]["logprob"] > step["top_logprobs"][-1]["logprob"] for step in steps)
        assert len({step["id"] for step in steps}) > 1
    first, second = ([step["id"] for step in steps] for steps in answers)
    assert first != second


def completions(engine: Path, model: str, log: Path) -> list[list[dict[str, Any]]]:
    """Greedy tokens with their five best, for every prompt."""
    port = free_port()
    with log.open("wb") as out:
        server = subprocess.Popen(
            [engine, "-m", model, "-c", "512", "-np", "1", "-t", "2", "--fit", "off", "--check-tensors",
             "--no-warmup", "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=clean_env(os.environ),
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_for(client, server, log)
            return [ask(client, prompt) for prompt in PROMPTS]
    finally:
        server.kill()
        server.wait()


def ask(client: httpx.Client, prompt: str) -> list[dict[str, Any]]:
    body = {"prompt": prompt, "n_predict": N_PREDICT, "n_probs": 5, "temperature": 0, "ignore_eos": True}
    answer = client.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    steps: list[dict[str, Any]] = json.loads(answer.text)["completion_probabilities"]
    return steps


def wait_for(client: httpx.Client, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < deadline
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
