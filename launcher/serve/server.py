"""A running llama-server over HTTP. One attempt a call, no retries: the caller knows what waiting means."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from launcher.structs import RunRecord


class Client:
    """Blocking client of one server. A server bound to every address is asked on loopback.

    Every call raises httpx.HTTPError when the server cannot be reached or answers with an error status.
    """

    def __init__(self, host: str, port: int, *, api_key: str | None = None, timeout_s: float | None = 10.0) -> None:
        address = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
        address = f"[{address}]" if ":" in address and not address.startswith("[") else address
        self.base_url = f"http://{address}:{port}"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # trust_env=False: a proxy of the user's shell must not stand between us and loopback.
        self._http = httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def health(self) -> int:
        """HTTP status of /health: 200 ready, 503 loading, 0 nobody answers."""
        try:
            return self._http.get("/health", timeout=5.0).status_code
        except httpx.HTTPError:
            return 0

    def props(self) -> dict[str, Any]:
        """/props: template, build, slots in all, context of a slot."""
        return dict(self._get("/props"))

    def slots(self) -> list[dict[str, Any]]:
        """/slots: what every stream is doing."""
        return list(self._get("/slots"))

    def models(self) -> tuple[str, ...]:
        """Names that the server answers to: id and aliases of /v1/models."""
        names: list[str] = []
        for model in self._get("/v1/models")["data"]:
            names += [model["id"], *model.get("aliases", ())]
        return tuple(dict.fromkeys(names))

    def metrics(self) -> dict[str, float]:
        """/metrics without labels: `llamacpp:prompt_tokens_total` and so on."""
        reply = self._http.get("/metrics")
        reply.raise_for_status()
        pairs = (line.rsplit(" ", 1) for line in reply.text.splitlines() if line and not line.startswith("#"))
        return {name: float(number) for name, number in pairs}

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, timeout_s: float | None = None, **options: Any
    ) -> dict[str, Any]:
        """/v1/chat/completions, not streamed; `options` go into the body. No time-out unless one is given."""
        body = {"messages": list(messages), **options}
        reply = self._http.post("/v1/chat/completions", json=body, timeout=timeout_s)
        reply.raise_for_status()
        return dict(reply.json())

    def complete(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Any
    ) -> dict[str, Any]:
        """/completion, the server's own form, with `timings`: text or token ids; `options` go into the body."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **options}
        reply = self._http.post("/completion", json=body, timeout=timeout_s)
        reply.raise_for_status()
        return dict(reply.json())

    def _get(self, path: str) -> Any:
        reply = self._http.get(path)
        reply.raise_for_status()
        return reply.json()


def client_of(record: RunRecord, *, timeout_s: float | None = 10.0) -> Client:
    """A client for a server of ours, with its API key when it has one."""
    return Client(record.host, record.port, api_key=api_key(record), timeout_s=timeout_s)


def api_key(record: RunRecord) -> str | None:
    """First key of the run's --api-key-file, else LLAMA_API_KEY, else None."""
    if "--api-key-file" in record.argv:
        path = Path(record.argv[record.argv.index("--api-key-file") + 1])
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        for line in lines:
            if line.strip() and not line.startswith("#"):
                return line.strip()
    if "--api-key" in record.argv:
        return record.argv[record.argv.index("--api-key") + 1].split(",")[0]
    return (os.environ.get("LLAMA_API_KEY") or "").split(",")[0] or None


def said_something(reply: Mapping[str, Any]) -> bool:
    """Whether a chat reply holds at least one token or one letter; whatever is no chat reply says nothing."""
    usage = reply.get("usage")
    try:
        return bool(isinstance(usage, Mapping) and usage.get("completion_tokens")) or bool(answer_text(reply))
    except (KeyError, IndexError, TypeError, AttributeError):
        return False


def answer_text(reply: Mapping[str, Any]) -> str:
    """Text of a chat reply: its content, or what it thought when it got no further."""
    message = reply["choices"][0]["message"]
    return str(message.get("content") or message.get("reasoning_content") or "")
