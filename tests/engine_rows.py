"""The engine's own memory breakdowns (tests/golden/engine_rows.jsonl) with their command lines understood."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher.planner import budget, compute, drafter
from launcher.planner.owner import owners
from launcher.planner.shape import ModelShape, model_shape
from launcher.structs import Device, Settings
from launcher.units import MIB
from tests.models import SPECS, replica_header
from tests.replicas.make_replica import load_spec

DRAFTER = "dspark-DeepSeek-V4-Flash-0731-Q8_0"
ROWS = Path(__file__).parent / "golden" / "engine_rows.jsonl"


@lru_cache(maxsize=1)
def shapes() -> dict[str, ModelShape]:
    """Every replica's shape by model name."""
    return {load_spec(str(p))["name"]: model_shape(replica_header(p.stem)) for p in sorted(SPECS.glob("*.yaml"))}


@lru_cache(maxsize=1)
def nextn_shape(model: str) -> ModelShape:
    """The shape of a replica whose NextN blocks are loaded."""
    stem = next(p.stem for p in sorted(SPECS.glob("*.yaml")) if load_spec(str(p))["name"] == model)
    return model_shape(replica_header(stem), mtp=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of engine_rows.jsonl with its command line understood. Bytes are those printed, MiB rows truncated."""

    model: str
    backend: str
    tag: str
    full: bool
    mib: bool
    settings: Settings
    owned: tuple[int | None, ...]
    resident: tuple[bool, ...]
    override: bool
    devices: list[list[int]]
    host: list[int]
    draft: dict[str, Any] | None
    odd_flags: bool  # a flag that Settings does not know, beyond weights
    draft_model: str | None  # None: NextN blocks of the model itself
    draft_on: tuple[int, ...]  # devices of the drafter's context, as listed in draft["devices"]

    @property
    def shape(self) -> ModelShape:
        return nextn_shape(self.model) if self.settings.drafter_type == "draft-mtp" else shapes()[self.model]

    @property
    def unit(self) -> int:
        return MIB if self.mib else 1

    def slots(self, k: int) -> range:
        own = [i for i, o in enumerate(self.owned) if o == k]
        return range(own[0], own[-1] + 1) if own else range(0)

    @property
    def draft_shape(self) -> ModelShape | None:
        return shapes()[self.draft_model] if self.draft_model else None

    @property
    def drafted(self) -> budget.Problem:
        """The drafter's own problem, for the planner's own sums."""
        names = [f"{self.backend.upper()}{k}" for k in range(len(self.devices))]
        devices = tuple(
            Device(
                name=name,
                backend=self.backend,
                description="",
                buffer_type=name,
                total_bytes=None,
                free_bytes=None,
            )
            for name in names
        )
        return budget.Problem(shape=self.shape, draft=self.draft_shape, devices=devices, settings=self.settings)

    def moe(self, k: int | None = None) -> list[int]:
        """Loaded layers with experts, of one device or of all."""
        return [
            layer.index
            for layer in self.shape.layers
            if layer.bundle.file and (k is None or self.owned[layer.index] == k)
        ]


def _flags(args: str) -> dict[str, str]:
    words = shlex.split(args.replace("\\", "\\\\"))
    return {
        w: (words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("-") else "")
        for i, w in enumerate(words)
        if w.startswith("-") and not w[1:2].isdigit()
    }


@lru_cache(maxsize=1)
def rows() -> list[Row]:
    """Every row of the file."""
    found = []
    for line in ROWS.read_text().splitlines():
        r = json.loads(line)
        flags = _flags(r["args"])
        mtp = flags.get("--spec-type") == "draft-mtp"
        shape = nextn_shape(r["model"]) if mtp else shapes()[r["model"]]
        n_devices = len(r["devices"])
        split = [float(x) for x in flags["-ts"].split(",")] if "-ts" in flags else [1.0] * n_devices
        rule = flags.get("-ot", "")
        first_host = int(flags.get("-ncmoe", 0))
        resident = tuple(
            not rule
            or ("99999" in rule and f"|{i}|" not in rule.replace("(", "|"))
            or ("[02468]" in rule and i % 2 == 1)
            for i in range(shape.n_layer)
        )
        n_parallel = int(flags.get("-np", 1))
        settings = Settings(
            n_ctx_per_stream=int(flags["-c"]) // n_parallel,
            n_parallel=n_parallel,
            kv_unified="-kvu" in flags,
            n_batch=int(flags.get("-b", 2048)),
            n_ubatch=int(flags.get("-ub", 512)),
            type_k=flags.get("-ctk", "f16"),
            type_v=flags.get("-ctv", "f16"),
            flash_attn="off" if flags.get("-fa") == "off" else "on",
            drafter_type=flags.get("--spec-type"),
            draft_n_max=int(flags.get("--spec-draft-n-max", 0)),
            drafter_device="host" if flags.get("-devd") == "none" else flags.get("-devd"),
            drafter_layers=int(flags["-ngld"]) if "-ngld" in flags else None,
            drafter_experts="host" if "-cmoed" in flags else "auto",
        )
        found.append(
            Row(
                model=r["model"],
                backend=r["backend"],
                tag=r["tag"],
                full=r["full"],
                mib=r["unit"] == "MiB",
                settings=settings,
                owned=owners(shape.n_layer, split if n_devices else [], int(flags.get("-ngl", 999))),
                resident=tuple(x and i >= first_host for i, x in enumerate(resident)),
                override=bool(rule) or first_host > 0,
                devices=r["devices"],
                host=r["host"],
                draft=r.get("draft"),
                # no op offload on CUDA, cache on the host, whole sliding windows, layers left on the CPU
                odd_flags=("--no-op-offload" in flags and r["backend"] == "cuda")
                or bool({"-nkvo", "--swa-full"} & flags.keys())
                or int(flags.get("-ngl", 999)) < 99,
                draft_model=flags["-md"].removesuffix(".gguf") if "-md" in flags else None,
                draft_on=_draft_on(flags.get("-devd"), n_devices),
            )
        )
    return found


def _draft_on(named: str | None, n_devices: int) -> tuple[int, ...]:
    return tuple(range(n_devices)) if named is None else () if named == "none" else (int(named[-1]),)


def device_bound(row: Row, k: int) -> int:
    moe, here = row.moe(), row.moe(k)
    on_host = [i for i in moe if not row.resident[i]]
    return compute.device_compute_bytes(
        row.shape,
        row.settings,
        backend=row.backend,
        slots=row.slots(k),
        first=k == 0,
        output=row.owned[-1] == k,
        n_devices=len(row.devices),
        resident_here=any(row.resident[i] for i in here),
        host_here=any(not row.resident[i] for i in here),
        host_anywhere=bool(on_host),
        override=row.override,
        n_outputs=row.settings.n_ubatch if row.full else None,
        largest_host_expert_bytes=max((row.shape.layers[i].largest_expert_bytes for i in on_host), default=0),
    )


def host_bound(row: Row) -> int:
    return compute.host_compute_bytes(
        row.shape,
        row.settings,
        backends=(row.backend,) * len(row.devices),
        host_anywhere=any(not row.resident[i] for i in row.moe()),
        resident_anywhere=any(row.resident[i] for i in row.moe()),
        override=row.override,
        n_outputs=row.settings.n_ubatch if row.full else None,
    )


def draft_parts(row: Row, k: int) -> tuple[int, int, int]:
    """(weights, cache, compute bound) of the drafter on device `k`."""
    own, nextn = row.slots(k), None
    if row.draft_model is None:
        first = row.shape.n_layer - row.shape.n_nextn
        nextn = all(row.resident[first:])
    return drafter.parts(row.drafted, k, own.start, own.stop, nextn)


def drafted() -> list[Row]:
    """Rows with a drafter."""
    return [row for row in rows() if row.draft]


@dataclass(frozen=True, slots=True)
class Bound:
    """One buffer. arch `drafter ...` is a drafter's, `... NextN` that of NextN blocks. `all_logits` are CUDA rows with
    logits for the whole batch or without flash attention, which no server of ours has."""

    arch: str
    backend: str
    place: str
    all_logits: bool
    bound: int
    engine: int
    name: str


def bounds() -> Iterator[Bound]:
    """Every buffer that the bounds claim to cover, drafters included."""
    for row in rows():
        if row.odd_flags:
            continue
        name, logits = f"{row.model} {row.tag}", row.full and row.backend == "cuda"
        found: list[tuple[str, int | None, int, int]] = [(row.shape.arch, None, host_bound(row), row.host[2])]
        found += [(row.shape.arch, i, device_bound(row, i), x[2]) for i, x in enumerate(row.devices)]
        if row.draft:
            arch = f"{row.shape.arch} NextN" if row.draft_shape is None else f"drafter {row.draft_shape.arch}"
            buffers = zip(row.draft_on, row.draft["devices"], strict=True)
            found += [(arch, k, draft_parts(row, k)[2], x[2]) for k, x in buffers]
            found.append((arch, None, drafter.host_bytes(row.drafted)[1], row.draft["host"][2]))
        for arch, i, bound, size in found:
            if not size and bound <= MIB:
                continue  # nothing where nothing was planned
            place = "host" if i is None else "later" if i else "first"
            yield Bound(arch, row.backend, place, logits, bound, size * row.unit, name)


@lru_cache(maxsize=1)
def errors() -> dict[tuple[str, str, str], list[tuple[float, str]]]:
    """(arch, backend with '+' for full-logits rows of CUDA, place) -> (bound / engine - 1, tag), sorted."""
    found = defaultdict(list)
    for x in bounds():
        found[x.arch, x.backend + ("+" if x.all_logits else ""), x.place].append((x.bound / x.engine - 1, x.name))
    return {key: sorted(value) for key, value in found.items()}
