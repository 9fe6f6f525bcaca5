"""Rig files: a machine that is not here, written down, to plan for.

    schema: 1
    devices: [{name, total, description?, buffer_type?, free?, memory_gbps?, link_gbps?, context?, uuid?, pci?,
               numa_node?}]
    host: {total, cores, available?, triad_gbps?, numa_nodes?, interleave_gbps?, distribute_gbps?}

`numa_nodes` is a count, or a list of {node, total, cores, available?, socket?, bind_gbps?}.

Sizes as `24576MiB`; GB/s is 10^9 bytes a second. docs/slugs.md describes every key.
Raises SlugInvalid (rig-invalid) with every problem as file:line:col.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from launcher.facts.yaml_reader import Problems, Reader, integer, number, one_of, open_file, size, text
from launcher.structs import Device, Host, Inventory, NumaNode
from launcher.units import human

_NODE_NUMBER = integer(0, 1023)  # the kernel's CONFIG_NODES_SHIFT is 10 at most


def load_rig(path: Path) -> Inventory:
    """Devices and host of a rig file; the engine stays unknown. `free` missing means all, `available` likewise."""
    problems = Problems(path)
    top = open_file(path, problems)
    found = _inventory(top, path) if top else None
    problems.refuse("rig-invalid", "rig file")
    assert found is not None  # open_file notes why it gives no reader
    return found


def _inventory(r: Reader, path: Path) -> Inventory:
    r.get("schema", one_of("1"), "1", required=True)
    devices: list[Device] = []
    for below in r.sections("devices", required=True):
        device = _device(below)
        if device.name and device.name in (d.name for d in devices):
            below.wrong("name", f"{device.name} is named twice")
        devices.append(device)
    host = r.section("host", required=True)
    r.done()
    nothing = Host(total_bytes=0, available_bytes=0, limited_by="", cores=1)  # its absence is a problem by now
    return Inventory(devices=tuple(devices), host=_host(host, path) if host else nothing)


def _device(r: Reader) -> Device:
    name = r.get("name", _name, "", required=True)
    total = r.get("total", size, 0, required=True)
    free = r.get("free", size, total)
    if free > total > 0:
        r.wrong("free", "more than total")
    buffer_type = r.get("buffer_type", text, name)
    endpoint = re.search(r"\[(.+)\]$", buffer_type)  # RPC0[192.168.1.5:50052]
    device = Device(
        name=name,
        buffer_type=buffer_type,
        endpoint=endpoint.group(1) if endpoint else None,
        backend=re.sub("[^a-z]", "", name.lower()),
        description=r.get("description", text, name),
        total_bytes=total,
        free_bytes=free,
        uuid=r.get("uuid", text, None),
        pci=r.get("pci", text, None),
        context_bytes=r.get("context", size, None),
        link_bps=_gbps(r, "link_gbps"),
        memory_bps=_gbps(r, "memory_gbps"),
        numa_node=r.get("numa_node", _NODE_NUMBER, None),
    )
    r.done()
    return device


def _host(r: Reader, path: Path) -> Host:
    total = r.get("total", size, 0, required=True)
    count, nodes = _nodes(r, total)
    reach = sum(node.available_bytes for node in nodes) if nodes else total
    available = r.get("available", size, min(total, reach))
    if available > total > 0:
        r.wrong("available", "more than total")
    elif nodes and available > reach:
        r.wrong("available", f"more than the {human(reach)} that its nodes have available")
    host = Host(
        total_bytes=total,
        available_bytes=available,
        limited_by=path.name,
        cores=r.get("cores", integer(1, 4096), 1, required=True),
        numa_nodes=count,
        nodes=nodes,
        triad_bps=_gbps(r, "triad_gbps"),
        interleave_bps=_gbps(r, "interleave_gbps"),
        distribute_bps=_gbps(r, "distribute_gbps"),
        numactl="numactl",  # whoever plans for a machine that is not here can install it there
    )
    r.done()
    return host


def _nodes(r: Reader, total: int) -> tuple[int, tuple[NumaNode, ...]]:
    """(nodes with memory, what is known of each: nothing where the file gives their count alone)."""
    node = r.raw("numa_nodes")
    if not isinstance(node, yaml.SequenceNode):
        return (1 if node is None else r.scalar(node, "numa_nodes", integer(1, 256), 1)), ()
    found: list[NumaNode] = []
    for below in r.sections("numa_nodes"):
        one = _node(below)
        if one.index in (other.index for other in found):
            below.wrong("node", f"node {one.index} is given twice")
        found.append(one)
    if not found:
        r.wrong("numa_nodes", "an empty list; give a count, or one entry for each node")
    if (sum_of := sum(one.total_bytes for one in found)) > total > 0:
        r.wrong("numa_nodes", f"{human(sum_of)} in all, more than host.total, {human(total)}")
    return max(1, len(found)), tuple(sorted(found, key=lambda one: one.index))


def _node(r: Reader) -> NumaNode:
    total = r.get("total", size, 0, required=True)
    available = r.get("available", size, total)
    if available > total > 0:
        r.wrong("available", "more than total")
    node = NumaNode(
        index=r.get("node", _NODE_NUMBER, 0, required=True),
        total_bytes=total,
        available_bytes=available,
        cores=r.get("cores", integer(0, 4096), 0, required=True),
        socket=r.get("socket", integer(0, 255), None),
        bps=_gbps(r, "bind_gbps"),
    )
    r.done()
    return node


def _gbps(r: Reader, key: str) -> float | None:
    found = r.get(key, number(0.001, 1e6), None)
    return None if found is None else found * 1e9


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z]+[0-9]*", value):
        msg = f"expected the engine's name, as CUDA0, found {value!r}"
        raise ValueError(msg)
    return value
