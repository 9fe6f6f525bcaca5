"""The servers that are measured: ours as planned, and llama-server as people start it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from acceptance.matrix import Run
from launcher.errors import EngineFailed
from launcher.facts import gguf_header, load_log, nvml
from launcher.measure import learned, timing, verify, watch
from launcher.planner import model_shape
from launcher.serve.server import Client
from launcher.structs import Audit
from launcher.units import MIB
from launcher.workflows import overrides
from launcher.workflows import plan as pipeline
from launcher.workflows.plan import Planned

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("load_s", "decode_tps", "prefill_4096_tps", "prefill_30000_tps", "least_free_mib", "error")
_BOOT_S = 400
_DECODE, _DECODES = 128, 3
_FIT = re.compile(r"fitting params to free memory took ([\d.]+) seconds")


@dataclass(kw_only=True)
class Server:
    """One that answers. `before` is free memory by UUID before it was started."""

    client: Client
    process: subprocess.Popen[bytes]
    log: Path
    load_s: float
    n_vocab: int
    before: Mapping[str, int]
    planned: Planned | None = None
    found: Audit | None = None

    def log_text(self) -> str:
        """Its whole log."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def audit(self) -> dict[str, Any]:
        """Plan beside load log and driver."""
        assert self.planned is not None
        plan = self.planned.plan
        seen = verify.held(
            tuple(d.device for d in plan.devices if d.device.uuid),
            nvml.nvml_cards(),
            self.before,
            frozenset({self.process.pid}),
        )
        text = self.log_text()
        self.found = verify.audit(plan, load_log.parse_load_log(text), seen)
        # a context may reserve more than once: which figures the log gave, and for which graph
        return asdict(self.found) | {"reserved": [x for x in text.splitlines() if "sched_reserve" in x][-40:]}

    def learn(self) -> None:
        """Keep what this launch showed, as `switch` does."""
        engine = self.planned.inventory.engine if self.planned else None
        if self.found is not None and self.planned is not None and engine is not None:
            learned.learn(self.planned.plan, self.found, engine.digest, nvml.driver_version())


@dataclass(kw_only=True)
class Bench:
    """One run's arms."""

    run: Run
    target: Mapping[str, Path]
    engine: str | None
    work: Path
    say: Callable[[str], None]
    n_cpu_moe: int | None = None
    _planned: Planned | None = field(default=None)

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        self.n_vocab = model_shape(gguf_header.read_header(self.target["model"])).n_vocab

    # ------------------------------------------------------------------------------------------ plans

    def given(self) -> dict[str, Any]:
        """Overrides of the plan."""
        return dict(self.run.given) | ({"drafter": str(self.target["draft"])} if "draft" in self.target else {})

    def alike(self) -> dict[str, Any]:
        """Those that an inventory without an engine understands: it does not know virtual devices."""
        return {k: v for k, v in self.given().items() if k != "reserve" or not self.run.virtual}

    def planned(self) -> Planned:
        """Our plan now, with what was learned so far."""
        return pipeline.run(str(self.target["model"]), self.given(), engine=self.engine)

    def time_plans(self) -> dict[str, Any]:
        """Seconds of the whole command: by arithmetic, with its dry runs, and once these are kept."""
        engine = [*overrides.words(self.given()), *(["--engine", self.engine] if self.engine else [])]
        line = [sys.executable, "-m", "launcher", "plan", str(self.target["model"]), "--json"]
        started = time.monotonic()
        pipeline.run(str(self.target["model"]), self.alike(), no_engine=True)
        # what the arithmetic itself takes, header included, without the start of an interpreter
        found: dict[str, Any] = {"in_process_s": round(time.monotonic() - started, 3)}
        for name, more in (
            ("arithmetic", [*overrides.words(self.alike()), "--no-engine"]),
            ("dry_runs", engine),
            ("kept", engine),
        ):
            started = time.monotonic()
            done = subprocess.run([*line, *more], cwd=ROOT, capture_output=True, check=False, text=True)
            found[f"{name}_s"] = round(time.monotonic() - started, 3)
            found[f"{name}_rc"] = done.returncode
            if done.returncode not in (0, 6):
                found[f"{name}_error"] = done.stderr[-2000:]
        self.say(f"plan: {found}")
        return found

    def rung(self, n: int, of: int) -> None:
        """Progress of the ladder."""
        self.say(f"{self.run.name}: depth {n:,} of {of:,}")

    # --------------------------------------------------------------------------------------- servers

    @contextmanager
    def ours(self) -> Iterator[Server]:
        """Our launch as planned now."""
        planned = self.planned()
        port = free_port()
        words = list(planned.launch.argv)
        words[words.index("--port") + 1] = str(port)
        with self.booted(words, dict(planned.launch.env), port, "ours") as server:
            server.planned = planned
            yield server

    def words(self, arm: str, port: int) -> list[str]:
        """Command line of an arm that is not ours."""
        planned = self._planned or self.planned()
        self._planned = planned
        s, engine = planned.plan.settings, planned.launch.argv[0]
        line = [engine, "-m", str(self.target["model"]), "--host", "127.0.0.1", "--port", str(port)]
        if arm == "stock":
            return line
        line += ["-c", str(planned.plan.n_ctx_total), "-np", str(s.n_parallel), "-fa", "on", "-b", str(s.n_batch)]
        line += ["-ub", str(s.n_ubatch), "-ctk", s.type_k, "-ctv", s.type_v, "-lm", "none", "-lv", "4"]
        if arm == "fit":
            return [*line, "--fit", "on"]
        line += ["-ngl", "999", "--fit", "off"]
        return [*line, "--cpu-moe"] if arm == "cpumoe" else [*line, "--n-cpu-moe", str(self.smallest())]

    def smallest(self) -> int:
        """The smallest --n-cpu-moe that boots: from what our plan leaves on the host downwards."""
        if self.n_cpu_moe is None:
            planned = self._planned or self.planned()
            self.n_cpu_moe = sum(x.bundle_bytes > 0 and not x.resident for x in planned.plan.layers)
            for fewer in range(self.n_cpu_moe - 1, max(-1, self.n_cpu_moe - 5), -1):
                before, self.n_cpu_moe = self.n_cpu_moe, fewer
                try:
                    port = free_port()
                    with self.booted(self.words("ncmoe", port), dict(os.environ), port, "ncmoe-try"):
                        self.say(f"--n-cpu-moe {fewer} boots")
                except EngineFailed:
                    self.n_cpu_moe = before
                    break
        return self.n_cpu_moe

    @contextmanager
    def booted(self, words: list[str], env: dict[str, str], port: int, name: str) -> Iterator[Server]:
        """A server from its start to its end. Raises EngineFailed when it does not come up."""
        log = self.work / f"{name}-{int(time.time())}.log"
        before = {k: v for k, v in watch.free_now().items() if k != "host"}
        started = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        client = Client("127.0.0.1", port, timeout_s=None)
        try:
            while client.health() != 200:
                if process.poll() is not None or time.monotonic() - started > _BOOT_S:
                    tail = log.read_text(errors="replace").splitlines()[-4:]
                    raise EngineFailed(
                        "boot-failed", f"{name}: {process.poll()}: {' | '.join(tail)[-600:]}", fix=f"tail {log}"
                    )
                time.sleep(0.05)
            yield Server(
                client=client,
                process=process,
                log=log,
                load_s=time.monotonic() - started,
                n_vocab=self.n_vocab,
                before=before,
            )
        finally:
            client.close()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait()
            _settle(before)

    # --------------------------------------------------------------------------------------- samples

    def sample(self, arm: str) -> dict[str, Any]:
        """One start of an arm, measured: speeds, load time, memory."""
        port = free_port()
        try:
            if arm == "ours":
                with self.ours() as server:
                    audit = server.audit()  # before the first prompt: the margin is for what follows
                    server.learn()
                    resident = server.planned.plan.resident_layers if server.planned else ()
                    return self.measured(server) | {"audit": audit, "resident_layers": list(resident)}
            with self.booted(self.words(arm, port), dict(os.environ), port, arm) as server:
                return self.measured(server) | {"argv": self.words(arm, port)}
        except (EngineFailed, httpx.HTTPError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def measured(self, server: Server) -> dict[str, Any]:
        """Decode and prefill of fresh prompts; the first request warms up and is not counted."""
        seed, row = int(time.time()), {"load_s": round(server.load_s, 2)}
        boot = watch.free_now()
        with watch.Watch() as seen:
            timing.ask(server.client, timing.salted(512, self.n_vocab, seed), 16)
            decoded = [
                timing.ask(server.client, timing.salted(64, self.n_vocab, seed + 1 + i), _DECODE)
                for i in range(_DECODES)
            ]
            row["decode_tps"] = round(median(t.decode_tps or 0 for t in decoded), 3)
            if decoded[0].draft_n is not None:
                row["draft_n"] = sum(t.draft_n or 0 for t in decoded)
                row["draft_accepted"] = sum(t.draft_accepted or 0 for t in decoded)
            room = int(server.client.props()["default_generation_settings"]["n_ctx"])  # `stock` chooses its own
            row["n_ctx"] = room
            for n in (n for n in self.run.prefill if n + 8 <= room):
                found = timing.ask(server.client, timing.salted(n, self.n_vocab, seed + 10 + n), 8)
                row[f"prefill_{n}_tps"] = round(found.prefill_tps or 0, 1)
        log = load_log.parse_load_log(server.log_text())
        fit, memory = _FIT.search(server.log_text()), psutil.Process(server.process.pid).memory_info()
        row |= {
            "boot_free_mib": {k: round(v / MIB) for k, v in boot.items()},
            "least_free_mib": {k: round(v / MIB) for k, v in seen.least.items()},
            "resident_mib": round(memory.rss / MIB),
            "shared_mib": round(memory.shared / MIB),
            "model_bytes": dict(log.model_bytes),
            "kv_bytes": dict(log.kv_bytes),
            "compute_bytes": dict(log.compute_bytes),
            "fit_s": float(fit[1]) if fit else None,
        }
        return row


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _settle(before: Mapping[str, int]) -> None:
    """Wait, at most 10 s, until the cards have their memory back."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        now = watch.free_now()
        if all(now.get(k, 0) >= n - 64 * MIB for k, n in before.items()):
            return
        time.sleep(0.1)
