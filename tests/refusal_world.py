"""A whole machine made of files and doubles: memory, cards, engine, models and slugs, one thing at a time made wrong.

The engine is a script that answers --help, --version and --list-devices as told, and leaves a mark when anything else
is asked of it but a dry run. A process of ours stands for a server that works and must be left alone.
"""

from __future__ import annotations

import functools
import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.facts import host as host_facts
from launcher.facts import surroundings
from launcher.serve import gates_engine, native, state
from launcher.structs import RunRecord
from launcher.units import GIB, KIB, MIB
from launcher.workflows import preflight as preflight_workflow
from tests.builders import T, array, write_gguf
from tests.serve_builders import B11434
from tests.unit.test_devices import Nvml

# Names as they stand in a stripped CUDA library: the stock kernels f16, q4_0, q8_0 and bf16, each with itself.
STOCK_LIBRARY = b"\0".join(
    b"_ZL18flash_attn_ext_vecILi128ELi1EL9ggml_type%dELS0_%dELb0EEvPKcS2_" % (t, t) for t in (1, 2, 8, 30)
)
KEYS: dict[str, Any] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": 4,
    "qwen3moe.context_length": 32768,
    "qwen3moe.embedding_length": 1024,
    "qwen3moe.expert_feed_forward_length": 6144,
    "qwen3moe.attention.head_count": 8,
    "qwen3moe.attention.head_count_kv": 2,
    "qwen3moe.attention.key_length": 128,
    "qwen3moe.attention.value_length": 128,
    "qwen3moe.expert_count": 8,
    "qwen3moe.expert_used_count": 2,
    "tokenizer.ggml.tokens": array(8, ["a", "b", "c"]),
}
TENSORS = [T("token_embd.weight", (1024, 4096)), T("output.weight", (1024, 4096)), T("output_norm.weight", (1024,))]
for _i in range(4):
    TENSORS += [T(f"blk.{_i}.{name}.weight", shape, 1) for name, shape in (
        ("attn_norm", (1024,)), ("attn_q", (1024, 1024)), ("attn_k", (1024, 256)), ("attn_v", (1024, 256)),
        ("attn_output", (1024, 1024)), ("ffn_norm", (1024,)), ("ffn_gate_inp", (1024, 8)),
        ("ffn_gate_exps", (1024, 6144, 8)), ("ffn_up_exps", (1024, 6144, 8)), ("ffn_down_exps", (6144, 1024, 8)),
    )]  # fmt: skip
CARD = {
    "uuid": "GPU-aaaa1111-0000-0000-0000-000000000000", "name": "NVIDIA GeForce RTX 3090",
    "busId": "00000000:01:00.0", "total": 24576 * MIB, "free": 24125 * MIB, "processes": [], "mig": (0, 0),
    "gen": 4, "gen_max": 4, "width": 16, "width_max": 16, "memory_bus_bits": 384, "memory_clock_mhz": 9751,
}  # fmt: skip
LISTED = "  CUDA0: NVIDIA GeForce RTX 3090 (24123 MiB, 23800 MiB free)"


class World:
    """What one case is tried in; every method makes one thing so and returns what the case needs to name it."""

    def __init__(self, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.home, self.patch = folder, home, monkeypatch
        self.root = folder / "root"
        self.calls: list[str] = []
        self.mark = folder / "started"
        self.models = folder / "models"
        monkeypatch.setenv("MODEL_DIR", str(self.models))
        monkeypatch.setenv("HOME", str(folder / "user"))
        for name in [n for n in os.environ if n.startswith(("LLAMA_ARG_", "CUDA_", "XDG_CONFIG"))]:
            monkeypatch.delenv(name)
        for name in ("start", "stop", "exec_foreground"):
            monkeypatch.setattr(native, name, functools.partial(self._called, name))
        monkeypatch.setattr(gates_engine, "SYSTEM_CONFIG", self.root / "etc/llama.cpp/config.ini")
        monkeypatch.setattr(host_facts, "read_host", functools.partial(host_facts.read_host, self.root))
        look = functools.partial(surroundings.read_surroundings, root=self.root)
        monkeypatch.setattr(preflight_workflow, "read_surroundings", look)
        self.memory(60 * GIB)
        self.file("proc/self/status", "CapEff:\t0000000000000000\n")
        self.cards(CARD)
        self.engine()

    def _called(self, name: str, *_args: object, **_more: object) -> None:
        self.calls.append(name)
        msg = f"native.{name} was called"
        raise AssertionError(msg)

    # ------------------------------------------------------------------------------------ this machine

    def file(self, name: str, text: str) -> Path:
        """A file of the made-up /proc, /sys or /etc."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def memory(self, available: int, total: int = 64 * GIB) -> None:
        self.file("proc/meminfo", f"MemTotal: {total // KIB} kB\nMemAvailable: {available // KIB} kB\n")

    def control_group(self, limit: int, *, version: int = 2, path: str = "/user.slice/user-1000.slice") -> None:
        """A limit on the group above ours."""
        kind, names = ("cgroup2", "") if version == 2 else ("cgroup", "memory")
        file, used = (
            ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        self.file("proc/self/cgroup", f"{0 if version == 2 else 9}:{names}:{path}/app.scope\n")
        self.file("proc/self/mountinfo", f"32 23 0:28 / /sys/fs/cgroup rw - {kind} {kind} rw,memory\n")
        self.file(f"sys/fs/cgroup{path}/{file}", f"{limit}\n")
        self.file(f"sys/fs/cgroup{path}/{used}", "0\n")
        (self.root / f"sys/fs/cgroup{path}/app.scope").mkdir()

    def mounted(self, kind: str, source: str, at: Path) -> None:
        self.file("proc/self/mountinfo", f"1 0 0:1 / / rw - ext4 /dev/x rw\n2 1 0:2 / {at} rw - {kind} {source} rw\n")

    def cards(self, *cards: dict[str, Any]) -> None:
        self.patch.setitem(sys.modules, "pynvml", Nvml(*cards))  # type: ignore[arg-type]

    # ---------------------------------------------------------------------------------------- the engine

    def engine(
        self,
        *,
        without: Iterable[str] = (),
        listed: Sequence[str] = (LISTED,),
        list_code: int = 0,
        help_text: str | None = None,
        help_code: int = 0,
        library: bytes | None = STOCK_LIBRARY,
    ) -> Path:
        """A llama-server of this machine, named by LLAMA_SERVER."""
        path = self.folder / "engine" / "llama-server"
        path.parent.mkdir(exist_ok=True)
        words = [f"{w} VALUE  text" for w in sorted(B11434 - {"--spec-type", *without})]
        words += [
            "--spec-type none,draft-simple  text",
            "--draft-min, --draft-n-min N  the argument has been removed. use",
        ]
        words[-1] += " --spec-draft-n-min"
        path.with_name("help.txt").write_text("\n".join(words) if help_text is None else help_text)
        path.with_name("list.txt").write_text("\n".join(["Available devices:", *listed, ""]))
        path.write_text(
            "#!/bin/sh\n"
            f'case "$1" in --help) cat "{path.with_name("help.txt")}"; exit {help_code};;\n'
            '--version) echo "version: 0.6.0-dev (build 11434, commit unknown)"; exit 0;;\n'
            f'--list-devices) cat "{path.with_name("list.txt")}"; exit {list_code};; esac\n'
            'for word; do [ "$word" = --log-jsonl ] && exit 1; done\n'
            f'echo "$@" > "{self.mark}"\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        beside = path.with_name("libggml-cuda.so")
        if library is None:
            beside.unlink(missing_ok=True)
        else:
            beside.write_bytes(library)
        self.patch.setenv("LLAMA_SERVER", str(path))
        return path

    # ------------------------------------------------------------------------------- models and slugs

    def model(self, name: str = "m.gguf", keys: dict[str, Any] | None = None, **how: Any) -> str:
        """A model file; keys that are None are left out."""
        kept = {k: v for k, v in (KEYS | (keys or {})).items() if v is not None}
        return str(write_gguf(self.models / name, kept, how.pop("tensors", TENSORS), **how))

    def slug(self, more: str = "", *, serve: str = "", status: str = "production", name: str = "my/one") -> str:
        """A slug of this user for m.gguf, which is made too."""
        self.model()
        path = self.home / "config" / "slugs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"schema: 1\nstatus: {status}\ntitle: one\nmodel: {{file: m.gguf}}\n"
            f"serve: {{port: 8099, n_ctx: 2k, cache_ram: 0, checkpoints: 0, threads: 1{serve}}}\n{more}"
        )
        return name

    def rig(self, text: str) -> str:
        path = self.folder / "rig.yaml"
        path.write_text(text)
        return str(path)

    def bytes(self, name: str, data: bytes) -> str:
        path = self.models / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return str(path)


def working_server(child: subprocess.Popen[bytes]) -> RunRecord:
    """The record of a server of ours that works; the child stands for it."""
    return RunRecord(
        slug="my/works", server=state.identify(child.pid), keeper=None, rpc_servers=(), rpc_endpoints=(),
        argv=("llama-server",), env_set={}, host="127.0.0.1", port=8100, alias="works", log_path="", state="ready",
        started_at=1.0,
    )  # fmt: skip


def written_record(child: subprocess.Popen[bytes]) -> RunRecord:
    """The same, kept where `switch` looks for what runs."""
    record = working_server(child)
    state.write(record)
    return record
