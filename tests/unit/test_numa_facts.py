"""NUMA nodes read from trees of fake /proc and /sys files."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.facts import host, numa
from launcher.structs import Host
from launcher.units import GIB, KIB

# total, free, file pages (Active + Inactive), reclaimable slab: GiB of each node; CPUs as the kernel lists them
TWO_SOCKETS = {0: (128, 100, 20, 2, "0-3,8-11"), 1: (128, 60, 10, 2, "4-7,12-15")}
SOCKET_OF = {cpu: int(cpu % 8 >= 4) for cpu in range(16)}


@pytest.fixture(autouse=True)
def _no_numactl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "numactl", lambda: None)


def tree(
    root: Path,
    nodes: dict[int, tuple[int, int, int, int, str]],
    *,
    held: int = 4,
    allowed: str | None = None,
    sockets: dict[int, int] = SOCKET_OF,
) -> Path:
    """held: GiB that the kernel keeps from MemAvailable, as its watermarks."""

    def put(name: str, text: str) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    kb = GIB // KIB
    total = sum(n[0] for n in nodes.values())
    available = sum(n[1] + n[2] + n[3] for n in nodes.values()) - held
    put("proc/meminfo", f"MemTotal: {total * kb} kB\nMemAvailable: {available * kb} kB\n")
    if allowed is not None:
        put("proc/self/status", f"Name:\tcat\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\n")
    for index, (size, free, files, slab, cpus) in nodes.items():
        lines = {
            "MemTotal": size, "MemFree": free, "FilePages": files + 7, "Active(file)": files / 4,
            "Inactive(file)": files * 3 / 4, "Shmem": 7, "SReclaimable": slab,
        }  # fmt: skip
        text = "".join(f"Node {index} {name}:{int(n * kb):>12} kB\n" for name, n in lines.items())
        put(f"sys/devices/system/node/node{index}/meminfo", text + f"Node {index} HugePages_Total:     0\n")
        put(f"sys/devices/system/node/node{index}/cpulist", cpus + "\n")
    for cpu, socket in sockets.items():
        put(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", f"{socket}\n")
        put(f"sys/devices/system/cpu/cpu{cpu}/topology/core_id", f"{cpu % 8}\n")
    return root


def read(root: Path, cpus: int = 16) -> Host:
    return host.read_host(root, frozenset(range(cpus)))


def test_two_sockets(tmp_path: Path) -> None:
    found = read(tree(tmp_path, TWO_SOCKETS))
    first, second = found.nodes
    assert (first.index, first.socket, first.cores, first.cpus) == (0, 0, 4, (0, 1, 2, 3, 8, 9, 10, 11))
    assert (second.index, second.socket, second.cores) == (1, 1, 4)
    # free + file pages + slab, less half of the 4 GiB that the kernel holds back; tmpfs pages cannot be dropped
    assert (first.available_bytes, second.available_bytes) == (120 * GIB, 70 * GIB)
    assert found.available_bytes == first.available_bytes + second.available_bytes
    assert (found.numa_nodes, found.limited_by) == (2, "MemAvailable")


def test_one_node_is_no_choice(tmp_path: Path) -> None:
    found = read(tree(tmp_path, {0: TWO_SOCKETS[0]}, allowed="0"))
    assert (found.numa_nodes, len(found.nodes), found.limited_by) == (1, 1, "MemAvailable")
    assert found.nodes[0].available_bytes == found.available_bytes == 118 * GIB


def test_four_clusters_of_one_socket(tmp_path: Path) -> None:
    clusters = {i: (64, 60, 2, 0, f"{2 * i}-{2 * i + 1},{2 * i + 8}-{2 * i + 9}") for i in range(4)}
    found = read(tree(tmp_path, clusters, sockets=dict.fromkeys(range(16), 0)))
    assert [(n.index, n.socket, n.cores, n.available_bytes // GIB) for n in found.nodes] == [
        (i, 0, 2, 61) for i in range(4)
    ]


def test_far_memory_without_cpus_and_a_node_without_memory(tmp_path: Path) -> None:
    root = tree(tmp_path, {**TWO_SOCKETS, 2: (256, 250, 0, 0, ""), 3: (0, 0, 0, 0, "16-19")})
    found = read(root)
    assert [(n.index, n.cores, n.socket) for n in found.nodes] == [(0, 4, 0), (1, 4, 1), (2, 0, None)]
    assert found.numa_nodes == 3


def test_numbers_may_have_gaps(tmp_path: Path) -> None:
    found = read(tree(tmp_path, {0: TWO_SOCKETS[0], 2: TWO_SOCKETS[1], 10: (8, 8, 0, 0, "")}))
    assert [n.index for n in found.nodes] == [0, 2, 10]


def test_a_cpuset_leaves_one_node_and_its_memory_alone(tmp_path: Path) -> None:
    found = read(tree(tmp_path, TWO_SOCKETS, allowed="1"))
    assert [n.index for n in found.nodes] == [1]
    assert (found.numa_nodes, found.available_bytes) == (1, 70 * GIB)
    assert found.limited_by == "/proc/self/status Mems_allowed_list"


def test_cores_are_those_that_we_may_run_on(tmp_path: Path) -> None:
    found = host.read_host(tree(tmp_path, TWO_SOCKETS), frozenset({0, 8, 1}))
    assert [(n.cores, n.cpus) for n in found.nodes] == [(2, (0, 1, 8)), (0, ())]


def test_nodes_that_do_not_tell_their_sizes_are_unknown_not_full(tmp_path: Path) -> None:
    root = tree(tmp_path, TWO_SOCKETS)
    (root / "sys/devices/system/node/node1/meminfo").write_text("Node 1 MemTotal: 9 kB\n")
    found = read(root)
    assert (found.nodes, found.numa_nodes, found.available_bytes) == ((), 2, 190 * GIB)


@pytest.mark.parametrize(("text", "expected"), [("1\n", 1), ("-1\n", None), ("0\n", 0), (None, None)])
def test_node_of_a_card(tmp_path: Path, text: str | None, expected: int | None) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "numa_node").write_text(text)
    assert numa.card_node("0000:01:00.0", tmp_path) == expected
    assert numa.card_node(None, tmp_path) is None
