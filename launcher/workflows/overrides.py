"""Options that win over the slug -> Settings, devices and address. Both spellings of contracts.md arrive here."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from launcher.errors import UsageError
from launcher.facts.slug_values import NUMA_MODES, layers, numa
from launcher.structs import Device, ModelHeader, PlacementPolicy, ServeSettings, Settings, Slug
from launcher.units import KV_TYPES, parse_size, parse_tokens

LOAD_MODES = ("none", "mmap", "mlock", "mmap+mlock", "dio", "auto")
# llama.cpp b11434: src/llama-cparams.h LLAMA_MAX_SEQ; -c is read as an int.
MOST_STREAMS = 256
MOST_TOKENS = 2**31 - 1
_FILES = frozenset({"drafter", "mmproj"})
# An option given now -> those of an earlier run that it replaces; a split counts the devices that were given with it.
_INSTEAD = {
    "ctx": ("ctx_total",), "ctx_total": ("ctx",), "kv": ("type_k", "type_v"), "devices": ("tensor_split",),
}  # fmt: skip
_SPELLED = {"ctx_total": "-c", "type_k": "-ctk", "type_v": "-ctv", "unified": "--unified"}


def words(given: Mapping[str, Any], without: Collection[str] = ()) -> list[str]:
    """Options as they would be typed again, all but those named."""
    found: list[str] = []
    for key, value in given.items():
        if key in without:
            continue
        option = _SPELLED.get(key, f"--{key.replace('_', '-')}")
        if isinstance(value, bool):
            found.append(option if value else option.replace("--", "--no-", 1))
        else:
            for item in value if isinstance(value, list | tuple) else (value,):
                # `-CUDA1` would read as an option of its own
                found += [f"{option}={item}"] if str(item).startswith("-") else [option, str(item)]
    return found


def absolute(path: str) -> str:
    """A path that holds from any folder; `off` and names that are no file here stay as they are."""
    found = Path(os.path.expanduser(path))  # noqa: PTH111 - leaves `~nobody` as it is where pathlib raises
    return str(found.absolute()) if path != "off" and found.exists() else path


def from_anywhere(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options to be kept for later, or for a service: their files by absolute paths."""
    return {k: absolute(v) if k in _FILES else v for k, v in given.items()}


def over(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an earlier run with those given now on top: what says the same in other words gives way to them."""
    kept = dict(then)
    if "kv" in kept and not {"kv", "type_k", "type_v"}.isdisjoint(now):
        kept["type_k"], _, type_v = str(kept.pop("kv")).partition("/")
        kept["type_v"] = type_v or kept["type_k"]
    for key, gone in _INSTEAD.items():
        for other in gone if key in now else ():
            kept.pop(other, None)
    return {**kept, **now}


def command(name: str, options: Mapping[str, str | bool | None]) -> str:
    """A command line without its TARGET: `launcher plan --rig FILE --no-engine`."""
    parts: list[str] = []
    for option, value in options.items():
        if value:
            parts += [option] if value is True else [option, shlex.quote(value)]
    return " ".join([name, *parts])


def invalid(option: str, problem: str, fix: str) -> UsageError:
    """The refusal of one option."""
    return UsageError("override-invalid", f"{option}: {problem}", fix=fix)


def nearest(option: str, word: str, words: Sequence[str]) -> str:
    """A fix for a word that is none of a list: the nearest one, else the first, and the others behind it."""
    first = (*difflib.get_close_matches(word, words, n=1), words[0])[0]
    others = ", ".join(dict.fromkeys(w for w in words if w != first))
    return f"{option} {first}     # or {others}"


def settings(slug: Slug | None, given: Mapping[str, Any]) -> Settings:
    """The slug's settings with the given options on top; the drafter's part is left to `with_drafter`.

    Raises UsageError (override-invalid).
    """
    serve = slug.serve if slug else ServeSettings()
    policy = slug.placement if slug else PlacementPolicy()
    n_parallel = _positive(given, "parallel", "--parallel") or serve.n_parallel
    if n_parallel > MOST_STREAMS:
        raise invalid("--parallel", f"{n_parallel} streams; llama.cpp has at most {MOST_STREAMS}", "--parallel 4")
    n_ctx = _context(given, serve, n_parallel)
    if (n_ctx or 0) * n_parallel > MOST_TOKENS:
        option = "-c" if "ctx_total" in given else "--ctx"
        counted = f"{n_ctx:,} tokens x {n_parallel} are more than llama.cpp counts ({MOST_TOKENS:,} in all)"
        raise invalid(option, counted, f"{option} 32k")
    type_k, type_v = _kv_types(given, serve)
    _split_mode(given)
    return Settings(
        n_ctx_per_stream=n_ctx,
        n_parallel=n_parallel,
        kv_unified=given.get("unified", serve.kv_unified),
        n_batch=max(_positive(given, "batch", "--batch") or serve.n_batch, _ubatch(given, serve)),
        n_ubatch=_ubatch(given, serve),
        type_k=type_k,
        type_v=type_v,
        flash_attn=_one_of(given, "flash_attn", "--flash-attn", ("on", "off", "auto")) or serve.flash_attn,
        load_mode=_one_of(given, "load_mode", "--load-mode", LOAD_MODES) or serve.load_mode,
        threads=_positive(given, "threads", "--threads") or serve.threads,
        numa=_numa(given) or serve.numa,
        cache_ram_bytes=serve.cache_ram_bytes,
        checkpoints=serve.checkpoints,
        drafter_device=slug.drafter.device if slug and slug.drafter else None,
        drafter_layers=slug.drafter.layers if slug and slug.drafter else None,
        drafter_experts=slug.drafter.experts if slug and slug.drafter else "auto",
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
    host = given.get("host", serve.host)
    if not host.strip():
        raise invalid("--host", "an empty address", "--host 127.0.0.1")
    return host, port


def choose_devices(devices: tuple[Device, ...], wanted: str | tuple[str, ...] | None) -> tuple[Device, ...]:
    """Devices in the order asked for: names, positions, UUID or PCI prefixes; `-NAME` leaves out; `none` for the host.

    Raises UsageError (device-unknown).
    """
    if not wanted:
        return devices
    asked = [w.strip() for w in wanted.split(",")] if isinstance(wanted, str) else list(wanted)
    if asked == ["none"]:
        return ()
    left_out = [_find(devices, w[1:]) for w in asked if w.startswith("-")]
    chosen = [_find(devices, w) for w in asked if not w.startswith("-")]
    named = [d.name for d in (*chosen, *left_out)]
    if twice := next((n for n in named if named.count(n) > 1), None):
        raise invalid("--devices", f"{twice} is named twice", f"--devices {','.join(dict.fromkeys(named))}")
    return tuple(d for d in chosen or devices if d not in left_out)


def _find(devices: tuple[Device, ...], word: str) -> Device:
    if word.isdecimal() and int(word) < len(devices):
        return devices[int(word)]
    low = word.lower()
    for d in devices if low else ():
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
    """Settings with a drafter of that kind, or with none; --draft-max wins, 0 means none.

    Raises UsageError (override-invalid).
    """
    asked = given.get("draft_max", n_max)
    if asked < 0:
        raise invalid("--draft-max", f"{asked} is negative", "--draft-max 5")
    if kind is None or asked == 0:
        return replace(
            found, drafter_type=None, draft_n_max=0, drafter_device=None, drafter_layers=None, drafter_experts="auto"
        )
    return replace(found, drafter_type=kind, draft_n_max=asked, **_drafter_place(found, given))


def _drafter_place(found: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Where the options put the drafter, over what the slug says."""
    device, n_layers = found.drafter_device, given.get("drafter_layers", found.drafter_layers)
    if "drafter_device" in given:
        word = str(given["drafter_device"]).strip()
        if not word or "," in word:
            why = "on several devices of its own the engine splits it by shares that belong to others"
            raise invalid("--drafter-device", f"{word!r} is not one device: {why}", "--drafter-device host")
        device = {"auto": None, "none": "host", "host": "host"}.get(word.lower(), word)
    if n_layers is not None and n_layers < 0:
        raise invalid("--drafter-layers", f"{n_layers} is negative", "--drafter-layers 2")
    experts = _one_of(given, "drafter_experts", "--drafter-experts", ("auto", "host")) or found.drafter_experts
    return {"drafter_device": device, "drafter_layers": n_layers, "drafter_experts": experts}


def pins(env: Mapping[str, str]) -> dict[int, tuple[int, ...]]:
    """Layers of card i that an environment names as OT_G<i>: `0,1,2`, `0-2`, or both kinds; an empty value is none.

    Raises UsageError (ot-g-invalid).
    """
    found: dict[int, tuple[int, ...]] = {}
    named: dict[int, str] = {}
    for name in sorted(n for n in env if re.fullmatch(r"OT_G[0-9]+", n) and env[n].strip()):
        card = int(name.removeprefix("OT_G"))
        if name != f"OT_G{card}":
            raise _ot_g(name, env, f"card {card} is written OT_G{card}", f"export OT_G{card}={shlex.quote(env[name])}")
        try:
            mine = tuple(sorted({i for part in env[name].split(",") for i in layers(part.strip())}))
        except ValueError as error:
            raise _ot_g(name, env, str(error), f"export {name}=0-2     # or 0,1,2; unset {name}: no pin") from error
        if twice := next((i for i in mine if i in named), None):
            raise _ot_g(name, env, f"layer {twice} is already on {named[twice]}", f"unset {name}")
        named |= dict.fromkeys(mine, name)
        found[card] = mine
    return found


def with_pins(
    found: Settings, wanted: Mapping[int, tuple[int, ...]], given: Mapping[str, Any], devices: tuple[Device, ...]
) -> Settings:
    """Settings whose residency is what OT_G<i> says: these bundles on card i of the plan's order, no others anywhere.

    devices  as they will be planned with, in order; without any there is nothing to pin to. `--residency` on the
             command line wins over the environment.
    Raises UsageError (ot-g-invalid).
    """
    if not wanted or not devices or "residency" in given:
        return found
    for card in wanted:
        if card >= len(devices):
            names = ", ".join(d.name for d in devices) or "none"
            raise UsageError(
                "ot-g-invalid",
                f"OT_G{card} names card {card}, and the plan has {len(devices)}, counted from 0",
                context=f"devices in order: {names}",
                fix=f"unset OT_G{card}",
            )
    # The numbers mean this order, so the planner may not choose another.
    return replace(found, residency={devices[card].name: mine for card, mine in wanted.items()}, keep_order=True)


def _ot_g(name: str, env: Mapping[str, str], problem: str, fix: str) -> UsageError:
    return UsageError("ot-g-invalid", f"{name}={env[name]}: {problem}", fix=fix)


def _context(given: Mapping[str, Any], serve: ServeSettings, n_parallel: int) -> int | None:
    if "ctx" in given and "ctx_total" in given:
        keep = f"--ctx {given['ctx']}     # of each stream; -c counts all of them together"
        raise invalid("--ctx and -c", "both were given", keep)
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
        if "type_k" in given or "type_v" in given:
            raise invalid("--kv and -ctk/-ctv", "both were given", f"--kv {given['kv']}     # K/V sets them apart")
        type_k, _, type_v = str(given["kv"]).partition("/")
        type_v = type_v or type_k
    type_k, type_v = given.get("type_k", type_k), given.get("type_v", type_v)
    for kind in (type_k, type_v):
        if kind not in KV_TYPES:
            raise invalid("--kv", f"{kind!r} is no KV cache type", nearest("--kv", kind, ("f16", *KV_TYPES)))
    return type_k, type_v


def _split_mode(given: Mapping[str, Any]) -> None:
    """Row and tensor splits cut every expert over the cards, and CUDA refuses them beside experts in host memory."""
    mode = str(given.get("split_mode", "layer")).lower()
    if mode == "none":
        raise invalid("--split-mode", "none uses one card: name it", "--devices CUDA0")
    if mode != "layer":
        raise invalid("--split-mode", f"{mode!r} would cut bundles apart; whole ones need layer", "--split-mode layer")


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
        raise invalid(option, f"{given[key]!r} is not known", nearest(option, word, words))
    return word


def _numa(given: Mapping[str, Any]) -> str | None:
    if "numa" not in given:
        return None
    try:
        return numa(str(given["numa"]).lower())
    except ValueError as error:
        raise invalid("--numa", str(error), nearest("--numa", str(given["numa"]).lower(), NUMA_MODES)) from error


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
        shares = [Decimal(part.strip()) for part in text.replace("/", ",").split(",")]
    except InvalidOperation:
        shares = [Decimal("NaN")]
    if not all(s.is_finite() and s < 10**6 and int(s.as_tuple().exponent) >= -9 for s in shares):
        raise invalid("--tensor-split", f"{text!r} is no list of numbers", "--tensor-split 21,23")
    if min(shares) < 0 or not any(shares):
        raise invalid("--tensor-split", f"{text!r} gives no device a layer", "--tensor-split 21,23")
    # llama.cpp takes fractions too; only their proportions count.
    digits = max(max(0, -int(s.as_tuple().exponent)) for s in shares)
    return tuple(int(s.scaleb(digits)) for s in shares)


def check_cache(found: Settings, header: ModelHeader) -> None:
    """Refuse cache types that the engine refuses only after it loaded the model (src/llama-context.cpp b11434).

    Raises UsageError (override-invalid).
    """
    quantised = found.type_v not in ("f32", "f16", "bf16")
    if quantised and found.flash_attn == "off":
        raise invalid("--kv", f"a V cache of type {found.type_v} needs flash attention", "--flash-attn on")
    latent = header.arch == "deepseek4" or f"{header.arch}.attention.key_length_mla" in header.metadata
    if latent and found.type_k != found.type_v:
        what = f"{header.arch} keeps one cache for K and V, so {found.type_k}/{found.type_v} cannot be"
        raise invalid("--kv", what, f"--kv {found.type_k}")
    keys = {k.removeprefix(f"{header.arch}."): v for k, v in header.metadata.items() if isinstance(v, int)}
    whole = keys.get("embedding_length", 0) // (keys.get("attention.head_count") or 1)
    for kind, what, size in (("key", found.type_k, "K"), ("value", found.type_v, "V")):
        width, block = keys.get(f"attention.{kind}_length", whole), KV_TYPES[what][0]
        if found.flash_attn != "off" and width % block:
            why = f"{size} heads of {width} are no multiple of the {block} values that a block of {what} holds"
            raise invalid("--kv", why, "--kv f16")
