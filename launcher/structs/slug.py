"""What a person writes: one slug, every default filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """Life of a slug; the last two need `--force`."""

    PRODUCTION = "production"
    INCUBATING = "incubating"
    DEPRECATED = "deprecated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """Which file to load: `dir` under MODEL_DIR, `file` in it; `repo` is where `setup` fetches it."""

    file: str
    dir: str | None = None
    repo: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRef:
    """The draft model; `type` is a value of the engine's --spec-type, `remote` its path in the repo.

    device, layers, experts: as Settings.drafter_*; the default follows the target's split.
    """

    file: str
    remote: str | None = None
    type: str
    n_max: int
    device: str | None = None
    layers: int | None = None
    experts: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRef:
    """What the slug asks of the engine: abilities (`flag:--x`, `spec-type:x`), container image, own binary."""

    needs: tuple[str, ...] = ()
    image: str | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcRef:
    """RPC devices by endpoint; `spawn` (loopback only): `switch` starts the servers and `stop` ends them.

    memory_bytes caps what the plan may put on each endpoint; None is all that the endpoint reports.
    """

    hosts: tuple[str, ...]
    spawn: bool = False
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """`serve:` of a slug. Context is per stream. None means `auto`."""

    host: str = "127.0.0.1"
    port: int = 8080
    alias: str | None = None
    n_ctx: int | None = None  # None: the model's training context
    n_parallel: int = 1
    kv_unified: bool = False
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: str = "on"
    type_k: str = "f16"
    type_v: str = "f16"
    threads: int | None = None
    load_mode: str = "none"
    numa: str = "auto"
    cache_ram_bytes: int | None = None
    checkpoints: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """`placement:` of a slug. residency: 'auto', 'none' or device name -> layer indices."""

    residency: str | Mapping[str, tuple[int, ...]] = "auto"
    margin_bytes: int | None = None
    reserve_bytes: Mapping[str, int] = field(default_factory=dict)
    order: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slug:
    """One hand-edited YAML file, every default filled in. `name` is `family/name`."""

    name: str
    path: str
    title: str
    status: Status
    model: ModelRef
    drafter: DrafterRef | None = None
    mmproj: str | None = None
    engine: EngineRef = field(default_factory=EngineRef)
    devices_min: int = 0
    serve: ServeSettings = field(default_factory=ServeSettings)
    placement: PlacementPolicy = field(default_factory=PlacementPolicy)
    rpc: RpcRef | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    thinking: bool | None = None
    chat_template: str | None = None
    api_key_file: str | None = None
    restarts: int = 0  # `restart:`, how often the keeper may start it again
    extra_args: tuple[str, ...] = ()
