"""`slugs/**/*.yaml` -> Slug. Every problem of a file is reported at once, as file:line:col.

A slug's name is its path below the slug folder without `.yaml` (`llamacpp/deepseek-flash-dual-q8`). The config
folder's `slugs/` is read before the shipped ones and shadows them. docs/slugs.md describes every key.

Raises SlugInvalid (slug-invalid), UsageError (slug-unknown, slug-ambiguous, spec-n-invalid).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

import launcher
from launcher import units
from launcher.errors import UsageError
from launcher.facts import paths, slug_values
from launcher.facts.yaml_reader import (
    Problems,
    Reader,
    boolean,
    did_you_mean,
    integer,
    number,
    one_of,
    open_file,
    or_none,
    size,
    text,
)
from launcher.structs import (
    DrafterRef,
    EngineRef,
    ModelRef,
    PlacementPolicy,
    RpcRef,
    ServeSettings,
    Slug,
    Status,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlugEntry:
    """A slug file that can be named; `shadows` when it stands in front of a shipped one."""

    name: str
    path: Path
    shadows: bool = False


def names() -> tuple[SlugEntry, ...]:
    """Every slug file, the user's before the shipped of the same name, sorted by name. None of them is read."""
    shipped = _found_in(shipped_dir())
    own = _found_in(paths.config_dir() / "slugs")
    found = shipped | own
    return tuple(SlugEntry(name=n, path=found[n], shadows=n in shipped and n in own) for n in sorted(found))


def load(target: str) -> Slug:
    """The slug whose name is, or alone ends in, `target`: `llamacpp/deepseek-flash-dual-q8`, `dual-q8`.

    An ending starts at a `/`, `-`, `_` or `.`; a whole last part (`smol-moe`) is preferred over a mere ending.
    Raises UsageError (slug-unknown, slug-ambiguous) and SlugInvalid.
    """
    entry = find(target)
    return load_file(entry.path, entry.name)


def find(target: str) -> SlugEntry:
    """The entry that `load` would read. Raises UsageError (slug-unknown, slug-ambiguous)."""
    entries = {e.name: e for e in names()}
    wanted = target.strip().removesuffix(".yaml")
    if wanted in entries:
        return entries[wanted]
    whole = [n for n in entries if n.endswith(f"/{wanted}")]
    endings = whole or [n for n in entries if wanted and n.endswith(wanted) and n[-len(wanted) - 1] in "/-_."]
    if len(endings) == 1:
        return entries[endings[0]]
    if endings:
        message = f"{target!r} is the end of {len(endings)} slugs"
        raise UsageError(
            "slug-ambiguous",
            message,
            context="  ".join(endings),
            fix=f"launcher plan {endings[0]}     # or {' | '.join(endings[1:])}",
        )
    guess = did_you_mean(wanted, [*entries, *(n.rpartition("/")[2] for n in entries)])
    raise UsageError(
        "slug-unknown",
        f"no slug is called {target!r}{guess}",
        context="known: " + ("  ".join(entries) or f"none in {paths.config_dir() / 'slugs'} or {shipped_dir()}"),
        fix="launcher list --all",
    )


def shipped_dir() -> Path:
    """`launcher/slugs` of an installed wheel, else `slugs` beside the package in a checkout."""
    package = Path(launcher.__file__).parent
    inside = package / "slugs"
    return inside if inside.is_dir() else package.parent / "slugs"


def with_environment(slug: Slug, env: Mapping[str, str]) -> Slug:
    """The slug with SPEC_N (draft depth, 0 is no drafter) of an environment applied; nothing without a drafter.

    Raises UsageError (spec-n-invalid).
    """
    value = env.get("SPEC_N", "").strip()
    if not value or slug.drafter is None:
        return slug
    try:
        n_max = integer(0, 64)(value)
    except ValueError as e:
        raise UsageError(
            "spec-n-invalid", f"SPEC_N={value}: {e}", fix="unset SPEC_N     # or SPEC_N=0: no drafter"
        ) from e
    return dataclasses.replace(slug, drafter=dataclasses.replace(slug.drafter, n_max=n_max) if n_max else None)


def load_file(path: Path, name: str) -> Slug:
    """Read one file. Raises SlugInvalid (slug-invalid) with every problem in `context`."""
    problems = Problems(path)
    top = open_file(path, problems)
    slug = None if top is None else _slug(top, name, path)
    problems.refuse("slug-invalid", "slug")
    assert slug is not None  # open_file notes why it gives no reader
    return slug


def _found_in(folder: Path) -> dict[str, Path]:
    files = sorted(folder.rglob("*.yaml")) if folder.is_dir() else []
    named = ((f.relative_to(folder).with_suffix("").as_posix(), f) for f in files)
    return {n: f for n, f in named if not any(part.startswith(".") for part in n.split("/"))}


# --------------------------------------------------------------------------------------- sections


def _slug(r: Reader, name: str, path: Path) -> Slug:
    r.get("schema", one_of("1"), "1", required=True)
    slug = Slug(
        name=name,
        path=str(path),
        title=r.get("title", text, "", required=True),
        status=r.get("status", slug_values.status, Status.INCUBATING, required=True),
        model=_model(r),
        drafter=_drafter(r),
        mmproj=r.get("mmproj", or_none("off", slug_values.inside), None),
        engine=_engine(r.section("engine")),
        devices_min=_devices_min(r.section("devices")),
        serve=_serve(r.section("serve")),
        placement=_placement(r.section("placement")),
        rpc=_rpc(r.section("rpc")),
        sampling=_sampling(r.section("sampling")),
        thinking=r.get("thinking", boolean, None),
        chat_template=r.get("chat_template", text, None),
        api_key_file=r.get("api_key_file", text, None),
        restarts=r.get("restart", slug_values.restarts, 0),
        extra_args=r.list_of("extra_args", text),
    )
    _fights(r, slug)
    r.done(
        {
            "restarts": "write restart: on-failure:2",
            "spec_n": "write drafter: {n_max: ...}",
            "n_ctx": "it belongs below serve",
            "port": "it belongs below serve",
        }
    )
    return slug


def _fights(top: Reader, slug: Slug) -> None:
    """Words of `extra_args` that would win over the plan: the engine takes the last value of a flag."""
    node = top.raw("extra_args")
    if not isinstance(node, yaml.SequenceNode):
        return
    items = [item for item in node.value if isinstance(item, yaml.ScalarNode)]
    for at, problem in slug_values.fights([i.value for i in items], lambda key: slug_values.value_of(slug, key)):
        top.problems.add(items[at], f"extra_args[{node.value.index(items[at])}]: {problem}")


def _model(top: Reader) -> ModelRef:
    r = top.section("model", required=True)
    if r is None:
        return ModelRef(file="")
    ref = ModelRef(
        file=r.get("file", slug_values.gguf, "", required=True),
        dir=r.get("dir", slug_values.inside, None),
        repo=r.get("repo", slug_values.repo, None),
    )
    r.done()
    return ref


def _drafter(top: Reader) -> DrafterRef | None:
    node = top.raw("drafter")
    if node is None or (isinstance(node, yaml.ScalarNode) and node.value == "off"):
        return None
    r = top.below(node, "drafter")
    if r is None:
        return None
    ref = DrafterRef(
        file=r.get("file", slug_values.gguf, "", required=True),
        remote=r.get("remote", slug_values.inside, None),
        type=r.get("type", slug_values.drafter_type, "", required=True),
        n_max=r.get("n_max", integer(1, 64), 1, required=True),
        device=r.get("device", or_none("auto", slug_values.drafter_device), None),
        layers=r.get("layers", or_none("all", integer(0, 1024)), None),
        experts=r.get("experts", one_of("auto", "host"), "auto"),
    )
    r.done()
    return ref


def _engine(r: Reader | None) -> EngineRef:
    if r is None:
        return EngineRef()
    ref = EngineRef(
        needs=r.list_of("needs", slug_values.need), image=r.get("image", text, None), path=r.get("path", text, None)
    )
    r.done()
    return ref


def _devices_min(r: Reader | None) -> int:
    if r is None:
        return 0
    least = r.get("min", integer(0, 64), 0)
    r.done()
    return least


def _serve(r: Reader | None) -> ServeSettings:
    d = ServeSettings()
    if r is None:
        return d
    kv = one_of(*units.KV_TYPES)
    settings = ServeSettings(
        host=r.get("host", slug_values.host, d.host),
        port=r.get("port", integer(1, 65535), d.port),
        alias=r.get("alias", text, d.alias),
        n_ctx=r.get("n_ctx", or_none("auto", slug_values.tokens), d.n_ctx),
        n_parallel=r.get("n_parallel", integer(1, 256), d.n_parallel),
        kv_unified=r.get("kv_unified", boolean, d.kv_unified),
        n_batch=r.get("n_batch", integer(1, 1 << 20), d.n_batch),
        n_ubatch=r.get("n_ubatch", integer(1, 1 << 20), d.n_ubatch),
        flash_attn=r.get("flash_attn", one_of("on", "off", "auto"), d.flash_attn),
        type_k=r.get("type_k", kv, d.type_k),
        type_v=r.get("type_v", kv, d.type_v),
        threads=r.get("threads", or_none("auto", integer(1, 1024)), d.threads),
        load_mode=r.get("load_mode", one_of(*slug_values.LOAD_MODES), d.load_mode),
        numa=r.get("numa", slug_values.numa, d.numa),
        cache_ram_bytes=r.get("cache_ram", or_none("auto", size), d.cache_ram_bytes),
        checkpoints=r.get("checkpoints", or_none("auto", integer(0, 1024)), d.checkpoints),
    )
    if settings.n_ubatch > settings.n_batch:
        r.wrong(
            "n_ubatch", f"{settings.n_ubatch} is above n_batch {settings.n_batch}; the engine would cut it silently"
        )
    if units.KV_TYPES[settings.type_v][0] > 1 and settings.flash_attn == "off":
        r.wrong("type_v", f"{settings.type_v} needs flash_attn: on, the engine ends after loading without it")
    r.done({"context": "the context is n_ctx", "ctx": "the context is n_ctx", "mmap": "write load_mode: none or mmap"})
    return settings


def _placement(r: Reader | None) -> PlacementPolicy:
    if r is None:
        return PlacementPolicy()
    policy = PlacementPolicy(
        residency=_residency(r),
        margin_bytes=r.get("margin", or_none("auto", size), None),
        reserve_bytes=_reserve(r.section("reserve")),
        order=_order(r),
    )
    r.done()
    return policy


def _residency(r: Reader) -> str | Mapping[str, tuple[int, ...]]:
    node = r.raw("residency")
    if node is None:
        return "auto"
    if isinstance(node, yaml.ScalarNode):
        return r.scalar(node, "residency", one_of("auto", "none"), "auto")
    devices = r.below(node, "residency")
    owner: dict[int, str] = {}
    found: dict[str, tuple[int, ...]] = {}
    for device, item in devices.scalars() if devices else ():
        layers = [i for span in devices.items(item, device, slug_values.layers) for i in span] if devices else []
        for layer in layers:
            if layer in owner:
                r.problems.add(item, f"placement.residency.{device}: layer {layer} is already on {owner[layer]}")
            owner[layer] = device
        found[device] = tuple(sorted(set(layers)))
    return found


def _order(r: Reader) -> tuple[str, ...] | None:
    node = r.raw("order")
    if node is None:
        return None
    if isinstance(node, yaml.ScalarNode):
        r.scalar(node, "order", one_of("auto"), "auto")
        return None
    devices = r.items(node, "order", text)
    if len(set(devices)) < len(devices):
        r.problems.add(node, "placement.order: a device is named twice")
    return devices


def _rpc(r: Reader | None) -> RpcRef | None:
    if r is None:
        return None
    ref = RpcRef(
        hosts=r.list_of("hosts", slug_values.endpoint, required=True),
        spawn=r.get("spawn", boolean, False),
        memory_bytes=r.get("memory", size, None),
    )
    if len(set(ref.hosts)) < len(ref.hosts):
        r.wrong("hosts", "an endpoint is named twice")
    if ref.memory_bytes == 0:
        r.wrong("memory", "0 leaves nothing to place there: remove the endpoint instead")
    far = [h for h in ref.hosts if not slug_values.is_loopback(h.rpartition(":")[0])]
    if ref.spawn and far:
        r.wrong("spawn", f"only loopback servers can be started here, {far[0]} is another machine: write spawn: false")
    r.done()
    return ref


def _sampling(r: Reader | None) -> Mapping[str, float]:
    if r is None:
        return {}
    kinds: dict[str, Callable[[str], float]] = {
        key: integer(-1, 1 << 20) if key in slug_values.WHOLE_SAMPLING_KEYS else number(-100, 1000)
        for key in slug_values.SAMPLING_KEYS
    }
    asked = {key: r.get(key, kind, None) for key, kind in kinds.items()}
    r.done({"temp": "write temperature", "repetition_penalty": "write repeat_penalty"})
    return {key: value for key, value in asked.items() if value is not None}


def _reserve(r: Reader | None) -> Mapping[str, int]:
    return {device: r.scalar(node, device, size, 0) for device, node in r.scalars()} if r else {}
