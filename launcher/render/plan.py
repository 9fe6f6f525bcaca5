"""The plan as people read it: the verdict first, a table that adds up, host memory, why, and ways out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from launcher.render import document, out, tradeoffs
from launcher.render import explain as explain_screen
from launcher.render.tradeoffs import between
from launcher.structs import Device, DevicePlan, Host, Inventory, Launch, Plan, WayOut
from launcher.units import GIB, MIB, engine_label, gib, human, mib

if TYPE_CHECKING:
    from rich.text import Text

_COLUMNS = (
    ("dense", "dense"), ("output", "output"), ("kv", "KV"), ("compute", "compute"), ("drafter", "drafter"),
    ("projector", "projector"), ("context", "context"), ("experts", "experts"),
)  # fmt: skip
_HOST_ROWS = (
    ("experts", "experts"), ("dense", "dense layers"), ("output", "output head"), ("embedding", "token embedding"),
    ("kv", "KV cache"), ("drafter", "drafter"), ("projector", "projector"), ("compute", "engine buffers"),
    ("output_buffer", "output buffer"), ("cache_ram", "prompt cache"), ("checkpoints", "checkpoints"),
    ("overhead", "process and driver"),
)  # fmt: skip
_TERMS = dict(_COLUMNS) | {"margin": "the margin kept free", "dense": "dense weights", "compute": "compute buffer"}
# Labels longer than this have a line of their own above; speeds need room in the same 100 columns.
_WAY_WIDTH, _WAY_WIDTH_FAST = 52, 34
_BACKENDS = {"cuda": "CUDA", "rpc": "RPC", "vulkan": "Vulkan"}


def show(
    plan: Plan,
    launch: Launch | None,
    inventory: Inventory,
    *,
    drafter_bytes: int | None = None,
    explain: bool = False,
    room: explain_screen.Room | None = None,
    rows: Sequence[tradeoffs.Row] | None = None,
    as_json: bool = False,
) -> None:
    """Print the plan document, or the screen.

    room  what one more bundle would need, part of what `explain` shows
    rows  the trade-offs, when they were asked for
    """
    if as_json:
        out.document(document.plan_document(plan, launch, rows))
        return
    out.show(screen(plan, launch, inventory, drafter_bytes=drafter_bytes, explain=explain, room=room, rows=rows))


def screen(
    plan: Plan,
    launch: Launch | None,
    inventory: Inventory,
    *,
    drafter_bytes: int | None = None,
    explain: bool = False,
    room: explain_screen.Room | None = None,
    rows: Sequence[tradeoffs.Row] | None = None,
) -> Iterator[Text | str]:
    """The lines of the screen, at most 100 columns apart from what must be copied as one line."""
    yield verdict(plan)
    yield from out.fold(_model(plan, drafter_bytes))
    yield from out.fold(_settings(plan, inventory))
    yield from out.fold(_rig(inventory))
    yield ""
    if plan.devices:
        yield from device_table(plan)
        yield from out.fold(placement(plan))
        yield ""
    yield from host_table(plan)
    if plan.host.numa is not None:
        yield from out.fold(f"{'NUMA':<11}{plan.host.numa.summary}")
    if (reason := why(plan)) is not None:
        yield ""
        yield from out.fold(reason)
    if plan.fits and (speed := speed_line(plan)) is not None:
        yield ""
        yield speed
    for warning in plan.warnings:
        yield from (out.line((text, "note")) for text in out.fold(f"note: {warning}"))
    if plan.refusal is not None and plan.refusal.ways_out:
        yield ""
        yield from ways_out(plan)
    if rows:
        yield ""
        yield from tradeoffs.table(rows)
    if explain:
        yield ""
        yield from explain_screen.explanation(plan, room)
    if plan.fits and launch is not None:
        yield ""
        yield out.line(("command", "head"), " (what `switch` and `run` start)")
        yield command(launch)


def verdict(plan: Plan) -> Text:
    """FITS or NO, the number that decided, on one line."""
    host = plan.host
    if plan.refusal is None:
        cards = _count(len(plan.devices), "device") if plan.devices else "no devices, everything in host memory"
        spare = gib(host.available_bytes - host.required_bytes)
        return out.line(
            ("FITS", "ok"),
            f"  {cards}; RAM needs {gib(host.required_bytes)} GiB, has {gib(host.available_bytes)}, spare {spare}",
        )
    r = plan.refusal
    largest = _TERMS.get(r.largest_term, r.largest_term)
    over = [d.device.name for d in plan.devices if d.short_bytes]
    if r.where == "host":
        rest = (
            ""
            if not plan.devices
            else "       (the devices fit)"
            if not over
            else f"       (also over: {', '.join(over)})"
        )
        on_nodes = f" ({host.numa.where})" if host.numa is not None and host.numa.where else ""
        return out.line(
            ("NO", "no"),
            f"  host RAM is short by {human(r.short_bytes)} on this rig: "
            f"needs {gib(r.needed_bytes)} GiB, has {gib(r.available_bytes)}{on_nodes}{rest}",
        )
    return out.line(
        ("NO", "no"),
        f"  {r.where} is short by {human(r.short_bytes)}: needs {mib(r.needed_bytes)} MiB, "
        f"has {mib(r.available_bytes)}; most of it: {largest}",
    )


def _model(plan: Plan, drafter_bytes: int | None) -> str:
    m = plan.model
    experts = f", {m.n_expert_used} of {m.n_expert} experts a token" if m.n_expert else ""
    drafter = f" + drafter {gib(drafter_bytes, 2)} GiB" if drafter_bytes else ""
    shards = f" in {m.shards} files" if m.shards > 1 else ""
    name = re.sub(r"-00001-of-\d+$", "", PurePath(m.path).stem)
    return f"{name}: {gib(m.file_bytes, 2)} GiB{shards}{drafter}; {m.arch}, {m.n_layer} layers{experts}"


def _settings(plan: Plan, inventory: Inventory) -> str:
    s = plan.settings
    kv = s.type_k if s.type_k == s.type_v else f"{s.type_k}/{s.type_v}"
    drafter = f"drafter {s.drafter_type} depth {s.draft_n_max}" if s.drafter_type and s.draft_n_max else "no drafter"
    engine = engine_label(inventory.engine.version) if inventory.engine else "no engine"
    streams = _count(s.n_parallel, "stream")
    total = f" = {plan.n_ctx_total:,}" if s.n_parallel > 1 else ""
    context = f"context {s.n_ctx_per_stream or 0:,} x {streams}{total}"
    return f"{context}, micro-batch {s.n_ubatch:,}, KV {kv}, {drafter}, {engine}"


def _rig(inventory: Inventory) -> str:
    host: Host = inventory.host
    names = [short_name(d) for d in inventory.devices]
    cards = ", ".join(f"{names.count(n)}x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))
    speed = f" {host.triad_bps / 1e9:.0f} GB/s" if host.triad_bps else ""
    by = f", limited by {host.limited_by}" if host.limited_by.startswith("/") else ""
    nodes = f"{host.numa_nodes} NUMA node{'s' if host.numa_nodes > 1 else ''}"
    return (
        f"rig: {cards or 'no devices'}, {host.cores} cores, RAM {gib(host.total_bytes)} GiB{speed} "
        f"({gib(host.available_bytes)} available{by}), {nodes}"
    )


def short_name(device: Device) -> str:
    """`RTX 3090` for `NVIDIA GeForce RTX 3090`."""
    return re.sub(r"^(NVIDIA |GeForce |AMD |Intel\(R\) )+|\s*\(.*\)$", "", device.description) or device.name


def device_table(plan: Plan) -> list[str]:
    """One row a device in MiB: the terms add up to `used`, `used` and `left` to `free`."""
    shown = [c for c in _COLUMNS if any(d.terms.get(c[0], 0) for d in plan.devices)]
    margins = sorted({d.terms.get("margin", 0) for d in plan.devices})
    least = mib(margins[0]) if len(margins) == 1 else f"{mib(margins[0])}-{mib(margins[-1])}"
    labels = {d.device.backend for d in plan.devices}
    own = {"context": _BACKENDS.get(next(iter(labels)), "context") if len(labels) == 1 else "context"}
    rows = [["MiB", *(own.get(key, label) for key, label in shown), "used", "free", "left", f"(min {least})"]]
    rows += [_device_row(d, [key for key, _ in shown]) for d in plan.devices]
    last = len(rows[0]) - 1
    for label_width, gap in ((28, 2), (28, 1), (18, 1), (10, 1)):
        short = [[row[0][:label_width].rstrip(), *row[1:]] for row in rows]
        lines = out.table(short, left=frozenset({0, last}), gap=gap)
        if max(map(len, lines)) <= out.WIDTH:
            break
    return lines


def _device_row(d: DevicePlan, terms: list[str]) -> list[str]:
    values = out.shares([d.terms.get(t, 0) for t in terms], MIB)
    free = round((d.device.free_bytes or 0) / MIB)
    used = sum(values)
    label = d.device.name if d.rig_name == d.device.name else f"{d.device.name} ({d.rig_name})"
    return [
        f"{label} {short_name(d.device)}",
        *(f"{v:,}" if v else "-" for v in values),
        f"{used:,}",
        f"{free:,}" if d.device.free_bytes is not None else "?",
        f"{free - used:,}",
        f"short {mib(d.short_bytes)}" if d.short_bytes else "ok",
    ]


def placement(plan: Plan) -> str:
    """Which layers' experts lie on which device, how many are left, and the split."""
    if not plan.devices:
        return "no devices: everything in host memory"
    sparse = [layer for layer in plan.layers if layer.bundle_bytes and layer.loaded]
    if not sparse:
        where = " | ".join(spans(d.layers) for d in plan.devices)
        return f"layers {where}; no expert bundles in this model            split -ts {_split(plan)}"
    resident = sum(layer.resident for layer in sparse)
    where = " | ".join(spans(d.resident_layers) for d in plan.devices)
    return (
        f"experts of {resident} of {len(sparse)} layers on the devices ({where}), of {len(sparse) - resident} in RAM"
        f"     split -ts {_split(plan)}"
    )


def _split(plan: Plan) -> str:
    return ",".join(map(str, plan.tensor_split))


def spans(numbers: Iterable[int]) -> str:
    """`0-3 40 42` for 0, 1, 2, 3, 40, 42; `-` for none."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in found) or "-"


def host_table(plan: Plan) -> list[str]:
    """Host memory in MiB: every term that is not zero, and the sum."""
    host = plan.host
    labels = dict(_HOST_ROWS)
    if host.layers:
        labels["experts"] = f"experts of {_count(len(host.layers), 'layer')}"
    if host.terms.get("checkpoints"):
        labels["checkpoints"] = _count(plan.settings.checkpoints or 0, "context checkpoint")
    terms = [key for key, _ in _HOST_ROWS if host.terms.get(key, 0)]
    values = out.shares([host.terms[t] for t in terms], MIB)
    width = max((len(labels[t]) for t in terms), default=0)
    rows = [f"{labels[t]:<{width}}  {v:>9,}" for t, v in zip(terms, values, strict=True) if v]
    needed, available = sum(values), round(host.available_bytes / MIB)
    left = available - needed
    verdict = f"spare {left:,}" if left >= 0 else f"short {-left:,}"
    rows.append(f"needed {needed:,}  -  available {available:,}  =  {verdict}")
    return [f"{'RAM, MiB' if i == 0 else '':<11}{row}" for i, row in enumerate(rows)]


def speed_line(plan: Plan) -> str | None:
    """`expected: decode 6.5-9.6 tok/s, prefill 170-290`, None where the rig's facts do not suffice."""
    decode, prefill = plan.speed.decode_tps, plan.speed.prefill_tps
    parts = [f"{n} {between(r)} tok/s" for n, r in (("decode", decode), ("prefill", prefill)) if r.low is not None]
    if not parts:
        return None
    by = f" (limited by {plan.speed.limited_by})" if plan.speed.limited_by else ""
    return f"expected: {', '.join(parts)}{by}"


def why(plan: Plan) -> str | None:
    """What a refusal of host memory is owed to, in numbers of this plan and of its ways out; None where it is not."""
    r = plan.refusal
    if r is None or r.where != "host":
        return None
    drafter = sum(d.terms.get("drafter", 0) for d in plan.devices)
    lean = next((w for w in r.ways_out if w.change.startswith("--drafter off")), None)
    more = lean.resident_layers - len(plan.resident_layers) if lean else 0
    if drafter and more > 0:
        held = f"the drafter takes {gib(drafter)} GiB of the devices"
        return f"why so much: {held}; without it those of {_count(more, 'more layer')} lie there"
    share = plan.host.terms.get(r.largest_term, 0) / max(1, plan.host.required_bytes)
    label = dict(_HOST_ROWS).get(r.largest_term, r.largest_term)
    if label == "experts" and plan.host.layers:
        label = f"experts of {_count(len(plan.host.layers), 'layer')}"
    return f"why so much: {share:.0%} of it is {label}"


def ways_out(plan: Plan) -> Iterator[Text | str]:
    """Numbered changes, each already planned on this rig; what follows TARGET replaces the options given before.

    Speeds are shown where one of them is known: the rig's facts may not suffice.
    """
    ways = plan.refusal.ways_out if plan.refusal else ()
    speeds = [[between(way.decode_tps), between(way.prefill_tps)] for way in ways]
    known = any(any(pair) for pair in speeds)
    widest = _WAY_WIDTH_FAST if known else _WAY_WIDTH
    titles = ["RAM GiB", "spare", "decode tok/s", "prefill tok/s"] if known else ["RAM need GiB", "spare GiB"]
    rows = [["WAYS OUT", "on devices", *titles, ""]]
    tall: list[str] = []
    for letter, way, pair in zip("abcdefgh", ways, speeds, strict=False):
        label = f" {letter} {way.change}"
        tall.append(label if len(label) > widest else "")
        rows.append(["" if tall[-1] else label, *_way_cells(way), *([s or "-" for s in pair] if known else []),
                     "FITS" if way.fits else "no"])  # fmt: skip
    heading, *lines = out.table(rows, left=frozenset({0, len(rows[0]) - 1}))
    yield heading
    for above, text, way in zip(tall, lines, ways, strict=False):
        if above:
            yield from out.fold(above, "     ")
        yield out.line(text.removesuffix("FITS"), ("FITS", "ok")) if way.fits else text


def _way_cells(way: WayOut) -> list[str]:
    spare = (way.host_available_bytes - way.host_required_bytes) / GIB
    return [_count(way.resident_layers, "layer"), gib(way.host_required_bytes), f"{spare:,.1f}"]


def command(launch: Launch) -> str:
    """The exact process as one line that a shell takes back."""
    env = " ".join(f"{k}={shlex.quote(v)}" for k, v in launch.env_set.items())
    return f"{env} {shlex.join(launch.argv)}".strip()


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
