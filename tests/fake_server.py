"""A real child process that plays llama-server, for failures which a real one does not produce on demand.

    python tests/fake_server.py --host H --port P --alias NAME [behaviour ...]

It listens before it "loads", answers 503 while it does, then serves /health, /props, /v1/models, /slots and
/v1/chat/completions. /completion reads a prompt of --read tokens, a batch of 512 every --batch-s, with the log lines
and counters of the real one. Flags of the real server that it does not need are accepted and passed over.
Only the standard library is imported: it starts in a few hundredths of a second.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FAILURES = {
    "oom": (
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9815.00 MiB on device 1: "
        "cudaMalloc failed: out of memory\n"
        "alloc_tensor_range: failed to allocate CUDA1 buffer of size 10291773440\n"
        "llama_model_load: error loading model: unable to allocate CUDA1 buffer\n"
        "srv  load_model: failed to load model, 'x.gguf'\nmain: exiting due to model loading error\n"
    ),
    "pinned": (
        "ggml_cuda_host_malloc: failed to allocate 141362.00 MiB of pinned memory: out of memory\n"
        "CUDA error: out of memory\n"
    ),
    "arg": "error: invalid argument: --no-mmap\n",
    # As ggml-cuda.cu says it (b11434: ggml_cuda_error): of its pool that grows with depth, of a handle it makes late.
    "pool": (
        "CUDA error: out of memory\n"
        "  current device: 1, in function alloc at /src/ggml/src/ggml-cuda/ggml-cuda.cu:550\n"
        "  cuMemCreate(&handle, reserve_size, &prop, 0)\n/src/ggml/src/ggml-cuda/ggml-cuda.cu:103: CUDA error\n"
    ),
    "cublas": (
        "CUDA error: the resource allocation failed\n"
        "  current device: 0, in function cublas_handle at /src/ggml/src/ggml-cuda/common.cuh:1379\n"
        "  cublasCreate_v2(&cublas_handles[device])\n/src/ggml/src/ggml-cuda/ggml-cuda.cu:103: CUDA error\n"
    ),
    "disguise": "E layer 0 is assigned to device CPU but fused Gated Delta Net tensors are on CUDA1\n",
}


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--alias", default="fake")
    parser.add_argument("--api-key-file")
    parser.add_argument("--load-s", type=float, default=0.0, help="answer 503 for this long, allocating meanwhile")
    parser.add_argument("--silent", action="store_true", help="while loading: no log line, no allocation")
    parser.add_argument("--hang", action="store_true", help="never get ready")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument(
        "--shrink", type=int, metavar="MIB", help="hold so much, give it back on SIGTERM, end 1.5 s later"
    )
    parser.add_argument("--fail", choices=sorted(FAILURES), help="print what the real one prints, exit 1 (or --die-at)")
    parser.add_argument("--exit-after", type=float, help="exit that many seconds after the start")
    parser.add_argument("--exit-code", type=int, default=0, help="with --exit-after")
    parser.add_argument("--die-by", help="with --exit-after: kill itself with this signal instead")
    parser.add_argument("--wrong-alias", action="store_true")
    parser.add_argument("--no-answer", choices=["error", "empty", "never", "garbage"])
    parser.add_argument("--thinks", action="store_true", help="the answer comes as reasoning_content")
    parser.add_argument("--read", type=int, help="tokens of every prompt that /completion gets; else its own, or 2048")
    parser.add_argument("--deaf", action="store_true", help="/completion says to have read one token less")
    parser.add_argument("--batch-s", type=float, default=0.05)
    parser.add_argument("--wedge-at", type=int, help="stand still for ever once so many are read, the slot busy")
    parser.add_argument("--cold", metavar="FILE", help="before its first batch: fault this file in, again and again")
    parser.add_argument("--cold-s", type=float, default=2.0, help="with --cold: for so long")
    parser.add_argument("--mute", action="store_true", help="no GET but /health is answered while a prompt is read")
    parser.add_argument("--die-at", type=int, help="exit with --exit-code once so many tokens are read")
    parser.add_argument("--print-env", help="write the environment there as JSON")
    parser.add_argument("--child", action="store_true", help="start a child of its own in the same group")
    return parser.parse_known_args(argv)[0]


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Slot:
    """The one slot: what it reads, and what was read since the start."""

    def __init__(self) -> None:
        self.busy = False
        self.task, self.read, self.written, self.read_in_all, self.steps = -1, 0, 0, 0, 0
        self.begun = time.monotonic()

    def line(self, function: str, text: str) -> None:
        micro = int((time.monotonic() - self.begun) * 1e6)
        minutes, rest = divmod(micro, 60_000_000)
        at = f"{minutes}.{rest // 1_000_000:02}.{rest // 1000 % 1000:03}.{rest % 1000:03}"
        say(f"{at} I slot {function:>12}: id  0 | task {self.task} | {text}")

    def take(self, opts: argparse.Namespace, n_tokens: int) -> None:
        self.busy, self.read, self.written = True, 0, 0
        self.task += 2
        self.line("launch_slot_", "processing task, is_child = 0")
        self.line("operator()", f"new prompt, n_ctx_slot = 65536, n_keep = 0, task.n_tokens = {n_tokens}")
        if opts.cold and not self.steps:
            fault_in(opts.cold, opts.cold_s)
        while self.read < n_tokens:
            time.sleep(opts.batch_s)
            self.step(min(512, n_tokens - self.read))
            self.line(
                "print_timing",
                f"prompt processing, n_tokens = {self.read:>6}, progress = {self.read / n_tokens:.2f}, "
                f"t = {opts.batch_s * self.steps:>6.2f} s / {512 / max(opts.batch_s, 1e-3):.2f} tokens per second",
            )
            if opts.die_at is not None and self.read >= opts.die_at:
                sys.stderr.write(FAILURES.get(opts.fail, ""))
                sys.stderr.flush()
                leave(opts)
            if opts.wedge_at is not None and self.read >= opts.wedge_at:
                time.sleep(3600)
        self.line("release", f"stop processing: n_tokens = {self.read}, truncated = 0")
        self.busy = False

    def step(self, tokens: int) -> None:
        self.read += tokens
        self.read_in_all += tokens
        self.steps += 1

    def page(self) -> dict[str, object]:
        idle: dict[str, object] = {"id": 0, "n_ctx": 2048, "speculative": False, "is_processing": self.busy}
        if not self.busy:
            return idle
        more = {"id_task": self.task, "n_prompt_tokens": self.read + 512, "n_prompt_tokens_processed": self.read}
        return idle | more | {"n_prompt_tokens_cache": 0, "next_token": [{"n_remain": 8, "n_decoded": self.written}]}

    def counters(self) -> str:
        return f"llamacpp:prompt_tokens_total {self.read_in_all}\nllamacpp:n_decode_total {self.steps}\n"


class Handler(BaseHTTPRequestHandler):
    slot: Slot
    opts: argparse.Namespace
    ready_at: float

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def loading(self) -> bool:
        if self.opts.hang or time.monotonic() < self.ready_at:
            error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
            self.reply(503, {"error": error})
            return True
        return False

    def do_GET(self) -> None:
        if self.loading():
            return
        alias = "somebody-else" if self.opts.wrong_alias else self.opts.alias
        pages = {
            "/health": {"status": "ok"},
            "/props": {"model_alias": alias, "total_slots": 1, "default_generation_settings": {"n_ctx": 2048}},
            "/v1/models": {"data": [{"id": alias, "aliases": [alias], "meta": {"n_ctx": 2048}}]},
            "/slots": [self.slot.page()],
        }
        if self.opts.mute and self.slot.busy and self.path != "/health":
            time.sleep(3600)
        if self.opts.api_key_file and self.path != "/health":
            with Path(self.opts.api_key_file).open() as keys:
                if self.headers.get("Authorization") != "Bearer " + keys.readline().strip():
                    self.reply(401, {"error": {"message": "Invalid API Key", "code": 401}})
                    return
        if self.path == "/metrics":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.slot.counters().encode())
            return
        self.reply(200, pages[self.path]) if self.path in pages else self.reply(404, {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if self.loading():
            return
        if self.path == "/completion":
            said = body.get("prompt")
            n_tokens = self.opts.read or (len(said) if isinstance(said, list) else 2048)
            self.slot.take(self.opts, n_tokens)
            self.reply(200, {"content": "hi", "tokens_evaluated": n_tokens - self.opts.deaf})
            return
        if self.opts.no_answer == "never":
            time.sleep(3600)
        if self.opts.no_answer == "error":
            self.reply(500, {"error": {"message": "decode failed", "code": 500}})
            return
        if self.opts.no_answer == "garbage":
            self.reply(200, ["no", "chat"])
            return
        empty = self.opts.no_answer == "empty"
        said = "" if empty else "hi"
        message = {"role": "assistant", "content": said}
        if self.opts.thinks:
            message = {"role": "assistant", "content": "", "reasoning_content": said}
        tokens = 0 if empty else min(2, body.get("max_tokens", 2))
        timings = {"prompt_n": 3, "predicted_n": tokens, "predicted_ms": 10.0}
        usage = {"completion_tokens": tokens, "prompt_tokens": 3, "total_tokens": 3 + tokens}
        self.reply(200, {"choices": [{"message": message}], "usage": usage, "timings": timings})


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # As the real one does: a second server on the same port is not noticed.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


def fault_in(path: str, seconds: float) -> None:
    """As a mapped model that is not in the page cache: pages come from the disk, and no token meanwhile."""
    until = time.monotonic() + seconds
    with Path(path).open("rb") as file:
        while time.monotonic() < until:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
                sum(pages[i] for i in range(0, len(pages), mmap.PAGESIZE))
            time.sleep(0.05)


def leave(opts: argparse.Namespace) -> None:
    if opts.die_by:
        os.kill(os.getpid(), signal.Signals[opts.die_by])
        time.sleep(5)
    os._exit(opts.exit_code)


def shrinking(mib: int) -> None:
    """As a server with 150 GB ends: its memory goes first, the process a while later."""
    ballast = [bytearray(os.urandom(1 << 20)) for _ in range(mib)]

    def end(_number: int, _frame: object) -> None:
        ballast.clear()
        threading.Timer(1.5, os._exit, [0]).start()

    signal.signal(signal.SIGTERM, end)


def main() -> int:
    opts = options(sys.argv[1:])
    if opts.shrink:
        shrinking(opts.shrink)
    if opts.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if opts.print_env:
        Path(opts.print_env).write_text(json.dumps(dict(os.environ)))
    if opts.child and os.fork() == 0:
        time.sleep(3600)
        os._exit(0)
    if opts.exit_after is not None:
        threading.Timer(opts.exit_after, leave, [opts]).start()
    if opts.fail == "arg" and opts.die_at is None:
        sys.stderr.write(FAILURES["arg"])
        return 1
    Handler.opts, Handler.slot = opts, Slot()
    Handler.ready_at = time.monotonic() + opts.load_s
    server = Server((opts.host, opts.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if opts.fail and opts.die_at is None:
        time.sleep(opts.load_s)
        sys.stderr.write(FAILURES[opts.fail])
        return 1
    held = []
    while time.monotonic() < Handler.ready_at:
        if not opts.silent:
            held.append(b"x" * (2 << 20))
            sys.stderr.write(f"load_tensors: piece {len(held)}\n")
            sys.stderr.flush()
        time.sleep(0.05)
    sys.stderr.write(f"main: model loaded\nmain: listening on http://{opts.host}:{opts.port}\n")
    sys.stderr.flush()
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main())
