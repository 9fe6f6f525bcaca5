"""Options that win over the slug -> Settings, devices and address. Both spellings of contracts.md arrive here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launcher.errors import UsageError
from launcher.facts.slug_values import NUMA_MODES
from launcher.structs import Device, Host, PlacementPolicy, ServeSettings, Settings, Slug
from launcher.units import KV_TYPES, parse_size, parse_tokens

LOAD_MODES = ("none", "mmap", "mlock", "mmap+mlock", "dio", "auto")


def invalid(option: str, problem: str, fix: str) -> UsageError:
    """The refusal of one option."""
    return UsageError("override-invalid", f"{option}: {problem}", fix=fix)


def settings(slug: Slug | None, given: Mapping[str, Any], host: Host) -> Settings:
    """The slug's settings with the given options on top; threads resolved, the drafter's part left to `drafter`.

    Raises UsageError (override-invalid).
    """
    serve = slug.serve if slug else ServeSettings()
    policy = slug.placement if slug else PlacementPolicy()
    n_parallel = _positive(given, "parallel", "--parallel") or serve.n_parallel
    type_k, type_v = _kv_types(given, serve)
    return Settings(
        n_ctx_per_stream=_context(given, serve, n_parallel),
        n_parallel=n_parallel,
        kv_unified=given.get("unified", serve.kv_unified),
        n_batch=max(_positive(given, "batch", "--batch") or serve.n_batch, _ubatch(given, serve)),
        n_ubatch=_ubatch(given, serve),
        type_k=type_k,
        type_v=type_v,
        flash_attn=_one_of(given, "flash_attn", "--flash-attn", ("on", "off", "auto")) or serve.flash_attn,
        load_mode=_one_of(given, "load_mode", "--load-mode", LOAD_MODES) or serve.load_mode,
        threads=_positive(given, "threads", "--threads") or serve.threads or host.cores,
        numa=_one_of(given, "numa", "--numa", NUMA_MODES) or serve.numa,
        cache_ram_bytes=serve.cache_ram_bytes,
        checkpoints=serve.checkpoints,
        residency=_one_of(given, "residency", "--residency", ("auto", "none")) or policy.residency,
        margin_bytes=_size(given, "margin", "--margin") if "margin" in given else policy.margin_bytes,
        reserve_bytes={**policy.reserve_bytes, **_reserve(given.get("reserve", ()))},
        tensor_split=_split(given.get("tensor_split")),
        # whoever names the devices, or the split over them, means this order
        keep_order=bool(given.get("devices") or given.get("tensor_split") or policy.order),
    )


def address(slug: Slug | None, given: Mapping[str, Any]) -> tuple[str, int]:
    """Host and port to listen on. Raises UsageError (override-invalid)."""
    serve = slug.serve if slug else ServeSettings()
    port = given.get("port", serve.port)
    if not 1 <= port <= 65535:
        raise invalid("--port", f"{port} is no port", "--port 8080")
    return given.get("host", serve.host), port


def choose_devices(devices: tuple[Device, ...], wanted: str | tuple[str, ...] | None) -> tuple[Device, ...]:
    """Devices in the order asked for: names, positions, UUID or PCI prefixes; `-NAME` leaves out; `none` for the host.

    Raises UsageError (device-unknown).
    """
    if not wanted:
        return devices
    words = [w.strip() for w in wanted.split(",")] if isinstance(wanted, str) else list(wanted)
    if words == ["none"]:
        return ()
    left_out = [_find(devices, w[1:]) for w in words if w.startswith("-")]
    chosen = [_find(devices, w) for w in words if w and not w.startswith("-")]
    return tuple(dict.fromkeys(d for d in chosen or devices if d not in left_out))


def _find(devices: tuple[Device, ...], word: str) -> Device:
    if word.isdigit() and int(word) < len(devices):
        return devices[int(word)]
    low = word.lower()
    for d in devices:
        if d.name.lower() == low or d.buffer_type.lower() == low or low == (d.endpoint or "").lower():
            return d
    near = [d for d in devices if len(low) >= 4 and any((x or "").lower().startswith(low) for x in (d.uuid, d.pci))]
    if len(near) == 1:
        return near[0]
    names = ", ".join(d.name for d in devices) or "none"
    raise UsageError(
        "device-unknown",
        f"no device is called {word!r}",
        context=f"devices here: {names}",
        fix=f"--devices {','.join(d.name for d in devices) or 'none'}",
    )


def with_drafter(found: Settings, kind: str | None, n_max: int, given: Mapping[str, Any]) -> Settings:
    """Settings with a drafter of that kind, or with none; --draft-max wins, 0 means none."""
    asked = given.get("draft_max", n_max)
    if asked < 0:
        raise invalid("--draft-max", f"{asked} is negative", "--draft-max 5")
    if kind is None or asked == 0:
        return replace(found, drafter_type=None, draft_n_max=0)
    return replace(found, drafter_type=kind, draft_n_max=asked)


def _context(given: Mapping[str, Any], serve: ServeSettings, n_parallel: int) -> int | None:
    if "ctx" in given and "ctx_total" in given:
        raise invalid("--ctx and -c", "both were given", "--ctx N is one stream, -c N is all of them: keep one")
    if "ctx" in given:
        return _tokens(given["ctx"], "--ctx")
    if "ctx_total" in given:
        total = _tokens(given["ctx_total"], "-c", zero=True)
        if 0 < total < n_parallel:
            raise invalid("-c", f"{total} tokens cannot be shared by {n_parallel} streams", f"-c {n_parallel}k")
        return total // n_parallel or None  # 0 is llama.cpp's word for the training context
    return serve.n_ctx


def _tokens(text: str, option: str, *, zero: bool = False) -> int:
    try:
        n = parse_tokens(str(text))
    except ValueError as error:
        raise invalid(option, str(error), f"{option} 32k") from error
    if n < (0 if zero else 1):
        raise invalid(option, f"{n} is no context", f"{option} 32k")
    return n


def _ubatch(given: Mapping[str, Any], serve: ServeSettings) -> int:
    ubatch = _positive(given, "ubatch", "--ubatch") or serve.n_ubatch
    batch = _positive(given, "batch", "--batch")
    # The engine cuts the micro-batch to the batch.
    return min(ubatch, batch) if batch else ubatch


def _kv_types(given: Mapping[str, Any], serve: ServeSettings) -> tuple[str, str]:
    type_k, type_v = serve.type_k, serve.type_v
    if "kv" in given:
        type_k, _, type_v = str(given["kv"]).partition("/")
        type_v = type_v or type_k
    type_k, type_v = given.get("type_k", type_k), given.get("type_v", type_v)
    for kind in (type_k, type_v):
        if kind not in KV_TYPES:
            raise invalid("--kv", f"{kind!r} is no KV cache type", f"--kv {' | '.join(KV_TYPES)}")
    return type_k, type_v


def _positive(given: Mapping[str, Any], key: str, option: str) -> int | None:
    if key not in given:
        return None
    if given[key] < 1:
        raise invalid(option, f"{given[key]} is less than 1", f"{option} 1")
    return int(given[key])


def _one_of(given: Mapping[str, Any], key: str, option: str, words: tuple[str, ...]) -> str | None:
    if key not in given:
        return None
    word = str(given[key]).lower()
    if word not in words:
        raise invalid(option, f"{given[key]!r} is not known", f"{option} {' | '.join(words)}")
    return word


def _size(given: Mapping[str, Any], key: str, option: str) -> int:
    try:
        return parse_size(str(given[key]))
    except ValueError as error:
        raise invalid(option, str(error), f"{option} 1GiB") from error


def _reserve(words: list[str] | tuple[()]) -> dict[str, int]:
    found = {}
    for word in words:
        name, _, size = word.partition("=")
        if not name or not size:
            raise invalid("--reserve", f"{word!r} names no size", "--reserve CUDA0=6GiB")
        found[name] = _size({"reserve": size}, "reserve", "--reserve")
    return found


def _split(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        found = tuple(int(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        raise invalid("--tensor-split", f"{text!r} is no list of whole numbers", "--tensor-split 21,23") from None
    if min(found) < 0 or not any(found):
        raise invalid("--tensor-split", f"{text!r} gives no device a layer", "--tensor-split 21,23")
    return found
