"""Devices that can hold weights: what the engine lists, joined with what the driver knows, under one identity.

Cards are numbered in PCI order (the engine always runs with CUDA_DEVICE_ORDER=PCI_BUS_ID); free memory is NVML's,
because the engine's own figure already lacks the context that it opened to ask.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.errors import DeviceUnusable
from launcher.facts import device_list, rpc
from launcher.facts import host as host_facts
from launcher.facts.engine import call, clean_env
from launcher.facts.nvml import NvmlCard, driver_trouble, nvml_cards
from launcher.structs import Device, Engine, Host
from launcher.units import MIB, human

__all__ = [
    "ListedDevice", "NvmlCard", "loopback_devices", "merge", "nvml_cards", "parse_list_devices", "read_devices",
    "visible_cards",
]  # fmt: skip

_LINE = re.compile(r"^ +(?P<name>[A-Za-z_]+\d*): (?P<desc>.*) \((?P<total>\d+) MiB, (?P<free>\d+) MiB free\)\s*$")
_VIRTUAL = re.compile(r" \(dev p(\d+)/v(\d+)\)$")
_SOFTWARE = re.compile(r"llvmpipe|lavapipe|swiftshader|softpipe", re.I)
# Arc 130V and the like are on the processor; the A, B and Pro series are cards. The RADV names are those of processors.
_INTEGRATED = re.compile(
    r"\bIntel\(R\) ((U?HD|Iris(\(R\))?|Iris(\(R\))? (Xe|Plus)|Arc\(TM\)) )?Graphics|"
    r"\bArc\(TM\) \d{3}[VTHU]\b|"
    r"\bRadeon(\(TM\))? (\w+ |Vega \d+ )?Graphics|\bRadeon \d{3}M\b|\(iGPU\)|\bAMD Custom GPU\b|"
    r"\(RADV (RAVEN2?|RENOIR|CEZANNE|LUCIENNE|BARCELO|REMBRANDT|MENDOCINO|VANGOGH|PHOENIX|STRIX\w*)\b",
    re.I,
)
_TRUST_BYTES = 512 * MIB  # how far the engine's free figure may lie above the driver's
_LIST_TIMEOUT_S = 30.0
# The engine opens a context on every card to list it, some 530 MiB: beside a full server that can take its last room.
_ROOM_BYTES = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedDevice:
    """One line of `--list-devices`; whole MiB, rounded down by the engine."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int

    @property
    def backend(self) -> str:
        """`CUDA0` -> `cuda`."""
        return self.name.rstrip("0123456789").lower()


def parse_list_devices(text: str) -> tuple[ListedDevice, ...]:
    """The devices in the engine's order; empty for `(none)`."""
    found = []
    for line in text.splitlines():
        if match := _LINE.match(line):
            total, free = int(match["total"]) * MIB, int(match["free"]) * MIB
            found.append(
                ListedDevice(name=match["name"], description=match["desc"], total_bytes=total, free_bytes=free)
            )
    return tuple(found)


def read_devices(
    engine: Engine | None,
    *,
    env: Mapping[str, str],
    rpc_hosts: tuple[str, ...] = (),
    busy_endpoints: Mapping[str, tuple[Device, ...]] | None = None,
    cards: Sequence[NvmlCard] | None = None,
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """(devices in the engine's order: RPC first, then local ones; warnings).

    env             the environment that the engine will be started from; its CUDA_VISIBLE_DEVICES counts
    busy_endpoints  endpoints that serve a server of ours, with the devices they had: these are never asked
    cards           the driver's cards; None asks NVML

    Without an engine the cards are named as a CUDA build would name them, and RPC endpoints are left out.
    Raises DeviceUnusable: engine-list-failed, rpc-unreachable, rpc-busy, rpc-failed, rpc-endpoint-invalid.
    """
    host = host_facts.read_host()
    seen, warnings = visible_cards(nvml_cards() if cards is None else cards, env)
    if cards is None and not seen and (trouble := driver_trouble()):
        warnings += (trouble,)
    if engine is None:
        devices, more = merge(None, seen, host=host)
        if rpc_hosts:
            more += (f"RPC devices at {', '.join(rpc_hosts)} are left out: only an engine can ask them",)
        return devices, warnings + more
    remote = _rpc_devices(engine, env, rpc_hosts, busy_endpoints or {}, host)
    full = [card for card in seen if card.free_bytes is not None and card.free_bytes < _ROOM_BYTES]
    if full:
        local, more = merge(None, seen, host=host)
        note = f"{full[0].name} has {human(full[0].free_bytes or 0)} free: the engine was not asked to list its devices"
        return remote + local, (*warnings, *more, note)
    kept = device_list.key(engine.digest, seen, env)
    if kept and (known := _kept(kept, seen)) is not None:
        local, more = merge(known, seen, host=host)
        return remote + local, warnings + more
    listed = call((engine.path, "--list-devices"), clean_env(env), _LIST_TIMEOUT_S)
    if listed.code != 0:
        raise DeviceUnusable(
            "engine-list-failed",
            f"{engine.path} --list-devices failed: {listed.note or f'code {listed.code}'}",
            context=listed.cause(),
            fix="nvidia-smi   # does the driver answer? then: launcher engine probe",
        )
    local, more = merge(parse_list_devices(listed.out), seen, host=host)
    if kept and not more and _cards_alone(local, seen):
        device_list.store(kept, listed.out)
    return remote + local, warnings + more


def _cards_alone(local: Sequence[Device], seen: Sequence[NvmlCard]) -> bool:
    """Whether each device is a card of its own that the driver knows: what is free is the driver's figure then."""
    return bool(local) and [d.uuid for d in local] == [c.uuid for c in seen]


def _kept(name: str, cards: Sequence[NvmlCard]) -> tuple[ListedDevice, ...] | None:
    """The kept list with what is free now, None without one."""
    said = device_list.load(name)
    listed = parse_list_devices(said) if said is not None else ()
    if len(listed) != len(cards):
        return None
    pairs = zip(listed, cards, strict=True)
    return tuple(replace(one, free_bytes=min(one.total_bytes, card.free_bytes or 0)) for one, card in pairs)


def visible_cards(cards: Sequence[NvmlCard], env: Mapping[str, str]) -> tuple[tuple[NvmlCard, ...], tuple[str, ...]]:
    """(cards that CUDA shows a process with this environment, in its order; warnings).

    CUDA_VISIBLE_DEVICES holds indices in PCI order, beginnings of UUIDs or MIG ids, and counts up to the first wrong
    one. Without it every whole card is seen; MIG slices then only as far as the driver likes, which is one.
    """
    whole = [card for card in cards if not card.mig]
    value = env.get("CUDA_VISIBLE_DEVICES")
    slices = [card for card in cards if card.mig]
    if value is None:
        if not slices:
            return tuple(whole), ()
        note = f"MIG is on: CUDA shows one slice unless CUDA_VISIBLE_DEVICES names it ({slices[0].uuid})"
        return (*whole, slices[0]), (note,)
    parents = list(dict.fromkeys(card.pci or card.uuid for card in cards))
    seen: list[NvmlCard] = []
    for token in (t.strip() for t in value.split(",")):
        if token.isdigit():
            fits = [c for c in cards if parents.index(c.pci or c.uuid) == int(token)][:1]
        else:
            fits = [c for c in cards if token and c.uuid and c.uuid.lower().startswith(token.lower())]
        if len(fits) != 1 or fits[0] in seen:
            return tuple(seen), () if token in ("", "-1", "NoDevFiles") else (
                f"CUDA_VISIBLE_DEVICES={value}: {token!r} is no card here; CUDA ignores it and all that follows",
            )
        seen.append(fits[0])
    return tuple(seen), ()


def merge(
    listed: Sequence[ListedDevice] | None, cards: Sequence[NvmlCard], *, host: Host | None = None
) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """(local devices, warnings) from the engine's list and the cards it can see; pure.

    listed None: no engine, the cards become CUDA0, CUDA1, ... A device is left out, with a warning, when it is a
    software renderer, shares the host's memory, or is a card that another backend already gives.
    """
    warnings: list[str] = []
    if listed is None:
        devices = [_device(f"CUDA{i}", card.name, card) for i, card in enumerate(cards)]
    else:
        devices = []
        joined = _join([one for one in listed if one.backend == "cuda"], cards, warnings)
        names = {one.description for one in listed if one.backend == "cuda"}
        for one in listed:
            if one.backend == "rpc":
                continue
            if reason := _left_out(one, names, host):
                if reason != "no memory":
                    warnings.append(f"{one.name} ({one.description}) is left out: {reason}")
                continue
            alone = sum(other.description == one.description for other in listed if other.backend == one.backend) == 1
            card = joined.get(one.name) or (_same_name(one, cards) if alone else None)
            devices.append(_listed_device(one, card, warnings))
        if cards and not names and not devices:
            warnings.append(f"{len(cards)} NVIDIA card(s) here, but this engine lists none: a build without CUDA?")
    for device in devices:
        if device.free_bytes is None:
            note = next(
                (c.note for c in cards if c.uuid and c.uuid == device.uuid and c.note), "the driver does not say"
            )
            warnings.append(f"cannot read the free memory of {device.name} ({device.description}): {note}")
    return tuple(devices), tuple(warnings)


def loopback_devices(endpoints: Sequence[str], host: Host, memory_bytes: int | None = None) -> tuple[Device, ...]:
    """The devices that CPU-only RPC servers on loopback will give once they are started, one for each endpoint.

    memory_bytes caps each; the engine itself reports all of the host's memory as free, which two of them cannot have.
    """
    free = min(memory_bytes or host.available_bytes, host.available_bytes)
    return tuple(
        Device(
            name=f"RPC{i}", buffer_type=f"RPC0[{endpoint}]", backend="rpc", description=endpoint,
            total_bytes=host.total_bytes, free_bytes=free, endpoint=endpoint, shares_host=rpc.is_loopback(endpoint),
        )
        for i, endpoint in enumerate(endpoints)
    )  # fmt: skip


def _rpc_devices(
    engine: Engine,
    env: Mapping[str, str],
    hosts: tuple[str, ...],
    busy: Mapping[str, tuple[Device, ...]],
    host: Host,
) -> tuple[Device, ...]:
    """Devices of every endpoint in the order of --rpc, numbered through as the engine will number them."""
    ask = tuple(dict.fromkeys(h for h in hosts if h not in busy))
    for endpoint in ask:
        rpc.check(endpoint)
    found = _ask_rpc(engine, env, ask, host) if ask else {}
    devices: list[Device] = []
    for endpoint in dict.fromkeys(hosts):
        for device in busy[endpoint] if endpoint in busy else found.get(endpoint, ()):
            devices.append(replace(device, name=f"RPC{len(devices)}"))
    return tuple(devices)


def _ask_rpc(
    engine: Engine, env: Mapping[str, str], endpoints: tuple[str, ...], host: Host
) -> dict[str, tuple[Device, ...]]:
    # No cards for this call: it would open a context on each only to list them a second time.
    argv = (engine.path, "--rpc", ",".join(endpoints), "--list-devices")
    listed = call(argv, {**clean_env(env), "CUDA_VISIBLE_DEVICES": ""}, _LIST_TIMEOUT_S, kill=False)
    if listed.code is None:
        raise DeviceUnusable(
            "rpc-busy",
            f"an RPC server at {', '.join(endpoints)} took another client while it was asked",
            context=f"{listed.note}; the question waits in its queue and ends by itself (do not kill it)",
            fix="launcher status   # stop the llama-server that uses it, or name another endpoint",
        )
    if listed.code != 0:
        raise DeviceUnusable(
            "rpc-failed",
            f"the engine cannot use the RPC server at {', '.join(endpoints)}: code {listed.code}",
            context=listed.cause(),
            fix=f"{engine.rpc_server or 'ggml-rpc-server'} -p PORT   # one of the same build as the engine",
        )
    found: dict[str, tuple[Device, ...]] = {}
    for one in parse_list_devices(listed.out):
        if one.backend != "rpc":
            continue
        endpoint = one.description
        before = found.get(endpoint, ())
        # Only the size tells: the protocol does not say what kind of device it is.
        cpu = rpc.is_loopback(endpoint) and abs(one.total_bytes - host.total_bytes) < 2 * MIB
        found[endpoint] = (
            *before,
            Device(
                name=one.name,
                buffer_type=f"RPC{len(before)}[{endpoint}]",
                backend="rpc",
                description=endpoint,
                total_bytes=one.total_bytes,
                # A CPU server reports all of the host's memory as free, whatever is left of it.
                free_bytes=min(one.free_bytes, host.available_bytes) if cpu else one.free_bytes,
                endpoint=endpoint,
                shares_host=cpu,
            ),
        )
    return found


def _join(cuda: Sequence[ListedDevice], cards: Sequence[NvmlCard], warnings: list[str]) -> dict[str, NvmlCard]:
    """Card of each CUDA device: the n-th device is the n-th visible card, if name and size agree.

    A card is given away once: a driver that shows fewer cards than the engine lists (a container, a lost card) must
    not make two devices out of one card's memory. Only virtual devices share.
    """
    joined: dict[str, NvmlCard] = {}
    left = list(range(len(cards)))
    for position, one in enumerate(cuda):
        virtual = _VIRTUAL.search(one.description)
        at = int(virtual[1]) if virtual else position
        free = range(len(cards)) if virtual else left
        if at not in free or not _alike(one, cards[at], bool(virtual)):
            same = [i for i in free if _alike(one, cards[i], bool(virtual))]
            at = same[0] if len(same) == 1 else -1
        if at >= 0:
            joined[one.name] = cards[at]
            if not virtual:
                left.remove(at)
        elif cards:
            warnings.append(
                f"{one.name} ({one.description}) matches no card of the driver: the engine's figures are used"
            )
    return joined


def _alike(one: ListedDevice, card: NvmlCard, virtual: bool) -> bool:
    name = _VIRTUAL.sub("", one.description)
    if card.name != "?" and name != card.name and not name.startswith(card.name) and not card.name.startswith(name):
        return False
    if virtual or not one.total_bytes or card.total_bytes is None:
        return True
    # CUDA shows up to 3 % less than the driver (24,123 of 24,576 MiB on an RTX 3090), never more.
    return 0.9 * card.total_bytes < one.total_bytes <= card.total_bytes + MIB


def _same_name(one: ListedDevice, cards: Sequence[NvmlCard]) -> NvmlCard | None:
    """The card behind a device of another backend (Vulkan lists in an order of its own), when the name is unique."""
    same = [card for card in cards if card.name == one.description]
    return same[0] if len(same) == 1 and one.backend != "cuda" else None


def _left_out(one: ListedDevice, cuda: set[str], host: Host | None) -> str:
    """Why a device is not planned with; empty when it is."""
    if one.backend == "cuda":
        return ""
    if not one.total_bytes:
        return "no memory"  # BLAS and other accelerators of the CPU
    if _SOFTWARE.search(one.description):
        return "a software renderer, it computes on the CPU"
    if _INTEGRATED.search(one.description):
        return "an integrated GPU, its memory is the host's"
    if cuda:
        return "the same card is there as a CUDA device" if one.description in cuda else "CUDA devices are there"
    if host and one.backend == "vulkan" and abs(one.total_bytes - host.total_bytes) < 2 * MIB:
        return "its memory is the host's"
    return ""


def _listed_device(one: ListedDevice, card: NvmlCard | None, warnings: list[str]) -> Device:
    device = _device(one.name, one.description, card)
    total, free = (
        one.total_bytes or None,
        one.free_bytes if one.total_bytes and one.free_bytes <= one.total_bytes else None,
    )
    if card is None or card.free_bytes is None:
        # The driver is silent: the engine's figures, which lack the context that it had open, if they can be true.
        if one.free_bytes > one.total_bytes:
            warnings.append(
                f"{one.name}: the engine says {human(one.free_bytes)} free of {human(one.total_bytes)}; not believed"
            )
        return replace(device, total_bytes=device.total_bytes or total, free_bytes=free)
    if _VIRTUAL.search(one.description):
        # Several devices on one card share its memory, and only the engine knows how. They get no UUID: a list of
        # visible devices that names one card twice shows none.
        return replace(device, uuid=None, total_bytes=one.total_bytes, free_bytes=one.free_bytes)
    if card.free_bytes is not None and one.free_bytes > min(card.free_bytes + _TRUST_BYTES, one.total_bytes or 1 << 62):
        warnings.append(
            f"{one.name}: the engine says {human(one.free_bytes)} free of {human(one.total_bytes)}, "
            f"the driver {human(card.free_bytes)}; the driver's figure is used"
        )
    return device


def _device(name: str, description: str, card: NvmlCard | None) -> Device:
    return Device(
        name=name,
        buffer_type=name,
        backend=name.rstrip("0123456789").lower(),
        description=description,
        total_bytes=card.total_bytes if card else None,
        free_bytes=card.free_bytes if card else None,
        uuid=card.uuid if card else None,
        pci=card.pci if card else None,
        link_bps=card.link_bps if card else None,
        memory_bps=card.memory_bps if card else None,
        processes=card.processes if card else (),
        numa_node=card.numa_node if card else None,
    )
