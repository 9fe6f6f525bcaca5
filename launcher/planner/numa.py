"""The choice of NUMA nodes: whose memory holds the host sum, and whose cores read it.

llama.cpp's `--numa distribute|isolate|numactl` place THREADS (ggml-cpu.c, set_numa_thread_affinity: thread i on node
i modulo n; on the node of the main thread; on the cores that numactl left). Memory lies where it is first touched,
and with `--load-mode none` one thread reads every tensor: all of it can land on one node. So memory is placed by a
policy of the process, which numactl sets before the engine starts: `--membind` (strict: no page elsewhere) or
`--interleave` (page by page in turn, spilling over when a node is full). Pinned buffers of CUDA obey it: the driver
maps them as shared memory of the process (seen on an H200: their line in numa_maps carries the policy).

    bind        the sum fits one node; threads on that node's cores. No access crosses the sockets
    interleave  else: the bandwidth of all nodes, at the price of crossings

Nodes of one socket (sub-NUMA clusters: NPS4, SNC) share its memory controllers' latency, and one of them has only its
share of the channels: they are taken together. Nodes without cores (CXL memory) are used last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.errors import UsageError
from launcher.structs import Host, NumaNode, NumaOption, NumaPlan
from launcher.units import gib

# Modes of llama-server itself: no memory policy of ours, so a page may lie on any node that we may use.
ENGINE_MODES = ("distribute", "isolate", "numactl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be placed.

    required_bytes  the host sum at its least; taken_bytes what other processes of the plan take of the same memory
    reads_weights   whether tokens are computed from host memory; without that no placement is worth a policy
    first           name and node of the device that copies offloaded experts (the first in order), where there is one
    threads         as the person gave them, None: all cores of what is chosen
    """

    required_bytes: int
    taken_bytes: int = 0
    reads_weights: bool = True
    first: tuple[str, int | None] = ("", None)
    threads: int | None = None


def choose(machine: Host, demand: Demand, wanted: str = "auto") -> NumaPlan | None:
    """Where host memory goes; None on a machine with one node, where there is nothing to choose.

    wanted  auto, off, bind, bind:N, interleave, interleave:LIST, or a mode of the engine

    auto: the largest measured bandwidth among what fits (ties: bind); nothing measured: one socket that holds the sum,
    the first device's before others, else all nodes with cores, else all. What a person names is kept, and the host
    gate then counts that memory alone.
    Raises UsageError (numa-node-unknown, numa-nodes-unknown).
    """
    mode, _, listed = wanted.partition(":")
    _check(machine, mode, listed)
    if machine.numa_nodes <= 1:
        return None
    placed = options(machine, demand)
    distribute = _free(machine, demand, "distribute")
    if mode == "auto":
        chosen, why = _auto(machine, demand, placed, distribute)
    elif mode in ("bind", "interleave"):
        chosen, why = _named(machine, demand, placed, mode, listed), "as asked"
    else:
        chosen, why = _free(machine, demand, mode), "as asked: memory lies where it is first touched"
    policy, threads = _policy(machine, chosen, demand.threads)
    if len(policy) == 1 and _part(machine, chosen):
        why += f"; {threads} threads are more than its {chosen.cores} cores, so they are not bound to these"
    others = tuple(o for o in (*placed, distribute) if (o.mode, o.nodes) != (chosen.mode, chosen.nodes))
    return NumaPlan(
        chosen=chosen,
        why=why,
        alternatives=others,
        policy=policy,
        engine_mode="numactl" if policy else chosen.mode if chosen.mode in ENGINE_MODES else None,
        numactl=machine.numactl,
        threads=threads,
        nodes=machine.nodes,
        summary=f"{chosen.label} ({_speed(chosen)}): {why}; else {', '.join(map(_told, others))}",
    )


def options(machine: Host, demand: Demand) -> tuple[NumaOption, ...]:
    """Every way to place memory by policy, in the order of choice where nothing is measured."""
    near = _near(machine)
    far = len(near) < len(machine.nodes)
    if not machine.nodes:
        return (_option(machine, demand, "interleave", ()),)
    groups = _sockets(near)
    whole = [_option(machine, demand, "bind" if len(g) == 1 else "interleave", g) for g in groups]
    _, first = demand.first
    whole.sort(key=lambda o: (first not in o.nodes, -o.available_bytes, o.nodes))
    found = whole if len(groups) > 1 or len(near) == 1 else []
    if len(near) > 1:
        found = [*found, _option(machine, demand, "interleave", near)]
    if far:
        found = [*found, _option(machine, demand, "interleave", machine.nodes)]
    clusters = [_option(machine, demand, "bind", (n,)) for g in groups if len(g) > 1 for n in g]
    clusters.sort(key=lambda o: (first not in o.nodes, -o.available_bytes, o.nodes))
    return (*found, *clusters)


def bandwidth_bps(machine: Host, plan: NumaPlan | None) -> float | None:
    """Bytes a second that decoding may count on; None where that was not measured.

    The machine's own figure is all nodes' together: it stands in for a placement over all nodes with cores, never for
    a part of them.
    """
    if plan is None:
        return machine.triad_bps
    if plan.chosen.bps is not None:
        return plan.chosen.bps
    return None if _part(machine, plan.chosen) else machine.triad_bps


def _auto(
    machine: Host, demand: Demand, placed: Sequence[NumaOption], distribute: NumaOption
) -> tuple[NumaOption, str]:
    if not demand.reads_weights:
        return _free(machine, demand, "off"), "no weights are read from host memory"
    if machine.numactl is None:
        return distribute, "numactl is not installed: memory lies where it is first touched"
    total = f"the host sum of {gib(demand.required_bytes)} GiB"
    fitting = [o for o in placed if o.fits]
    measured = [o for o in (*fitting, distribute) if o.fits and o.bps is not None]
    if measured:
        best = max(measured, key=lambda o: (o.bps or 0.0, o.mode == "bind"))
        return best, f"{total} fits there, and {(best.bps or 0) / 1e9:.0f} GB/s is the most that was measured"
    if not fitting:
        return max(placed, key=lambda o: (o.available_bytes, -len(o.nodes))), f"{total} fits no placement"
    best, (name, node) = fitting[0], demand.first
    if best.mode == "bind" or _part(machine, best):
        beside = f", {name}'s" if node in best.nodes else ""
        return best, f"{total} fits the {gib(best.available_bytes)} GiB there{beside}"
    if best is placed[0]:
        return best, "one socket has all the cores" if best.nodes else "only the number of nodes is known"
    return best, f"{total} fits nothing smaller"


def _named(machine: Host, demand: Demand, placed: Sequence[NumaOption], mode: str, listed: str) -> NumaOption:
    if listed:
        wanted = _numbers(listed)
        return _option(machine, demand, mode, tuple(n for n in machine.nodes if n.index in wanted))
    same = [o for o in placed if o.mode == mode and not (mode == "interleave" and _part(machine, o))]
    return next((o for o in same if o.fits), same[0] if mode == "bind" else same[-1])


def _option(machine: Host, demand: Demand, mode: str, nodes: Sequence[NumaNode]) -> NumaOption:
    reach = sum(n.available_bytes for n in nodes) if nodes else machine.available_bytes
    available = max(0, min(machine.available_bytes, reach) - demand.taken_bytes)
    every = len(nodes) == len(machine.nodes)
    bps = nodes[0].bps if mode == "bind" else machine.interleave_bps if every else None
    return NumaOption(
        mode=mode,
        nodes=tuple(n.index for n in nodes),
        available_bytes=available,
        fits=demand.required_bytes <= available,
        cores=sum(n.cores for n in nodes),
        bps=bps,
    )


def _free(machine: Host, demand: Demand, mode: str) -> NumaOption:
    """Without a policy: any node may hold a page."""
    every = _option(machine, demand, "interleave", machine.nodes)
    return NumaOption(
        mode=mode,
        nodes=(),
        available_bytes=every.available_bytes,
        fits=every.fits,
        cores=machine.cores,
        bps=machine.distribute_bps if mode == "distribute" else None,
    )


def _policy(machine: Host, chosen: NumaOption, threads: int | None) -> tuple[tuple[str, ...], int]:
    """(numactl's words, threads). Threads are bound where the memory is a part of the machine's, if they fit there:
    more threads than cores wait for each other at every barrier."""
    if chosen.mode not in ("bind", "interleave"):
        return (), threads or machine.cores
    listed = ",".join(str(n) for n in chosen.nodes) or "all"
    memory = f"--membind={listed}" if chosen.mode == "bind" else f"--interleave={listed}"
    if not chosen.cores or not _part(machine, chosen):
        return (memory,), threads or machine.cores
    wanted = threads or min(machine.cores, chosen.cores)
    if wanted > chosen.cores:
        return (memory,), wanted
    beside = ",".join(str(n.index) for n in machine.nodes if n.index in chosen.nodes and n.cores)
    return (f"--cpunodebind={beside}", memory), wanted


def _told(o: NumaOption) -> str:
    room = f"{gib(o.available_bytes)} GiB" if o.fits else f"only {gib(o.available_bytes)} GiB"
    return f"{o.label} ({_speed(o)}, {room})"


def _speed(o: NumaOption) -> str:
    return "GB/s unknown" if o.bps is None else f"{o.bps / 1e9:.0f} GB/s"


def _near(machine: Host) -> tuple[NumaNode, ...]:
    """Nodes with cores; all of them where none is known to have any."""
    return tuple(n for n in machine.nodes if n.cores) or machine.nodes


def _part(machine: Host, option: NumaOption) -> bool:
    """Whether memory lies beside some of the cores only."""
    return bool(option.nodes) and not {n.index for n in _near(machine)} <= set(option.nodes)


def _sockets(nodes: Iterable[NumaNode]) -> list[tuple[NumaNode, ...]]:
    """Nodes by socket; one whose socket is unknown stands alone."""
    found: dict[tuple[str, int], list[NumaNode]] = {}
    for n in nodes:
        key = ("node", n.index) if n.socket is None else ("socket", n.socket)
        found.setdefault(key, []).append(n)
    return [tuple(group) for group in found.values()]


def _check(machine: Host, mode: str, listed: str) -> None:
    if mode not in ("bind", "interleave"):
        return
    if machine.numa_nodes > 1 and not machine.nodes and (mode == "bind" or listed):
        raise UsageError(
            "numa-nodes-unknown",
            f"--numa {mode}{':' + listed if listed else ''} names nodes whose memory is not known: "
            f"there is only their count, {machine.numa_nodes}",
            fix="--numa interleave, or numa_nodes as a list in the rig file: "
            "[{node: 0, total: 256GiB, cores: 32}, {node: 1, total: 256GiB, cores: 32}]",
        )
    here = {n.index for n in machine.nodes}
    strange = sorted(_numbers(listed) - here) if here else []
    if strange:
        raise UsageError(
            "numa-node-unknown",
            f"--numa {mode}:{listed} names node {strange[0]}; nodes with memory that this process may use: "
            f"{', '.join(str(n) for n in sorted(here))}",
            fix=f"--numa {mode}:{min(here)}",
        )


def _numbers(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found
