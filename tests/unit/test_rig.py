"""Rig files: the golden ones, defaults, and every problem at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import SlugInvalid
from launcher.facts.rig import load_rig
from launcher.units import GIB, MIB

RIGS = Path(__file__).parents[1] / "golden" / "rigs"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rig.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(tmp_path: Path, text: str) -> list[str]:
    path = write(tmp_path, text)
    with pytest.raises(SlugInvalid) as e:
        load_rig(path)
    assert (e.value.exit_code, e.value.reference) == (3, "rig-invalid")
    assert e.value.fix.endswith(str(path))
    return [line.partition("rig.yaml:")[2] for line in e.value.context.splitlines()]


def test_two_3090() -> None:
    inventory = load_rig(RIGS / "2x3090.yaml")
    first, second = inventory.devices
    assert (first.name, first.buffer_type, first.backend, first.description) == ("CUDA0", "CUDA0", "cuda", "RTX 3090")
    assert (first.total_bytes, first.free_bytes) == (24576 * MIB, 24125 * MIB)
    assert (first.context_bytes, second.context_bytes) == (615 * MIB, 250 * MIB)
    assert (first.memory_bps, first.link_bps) == (936e9, 25e9)
    assert (first.uuid, first.pci, first.endpoint, first.shares_host) == (None, None, None, False)
    host = inventory.host
    assert (host.total_bytes, host.available_bytes, host.triad_bps) == (196 * GIB, 190 * GIB, 116e9)
    assert (host.cores, host.numa_nodes, host.limited_by) == (32, 1, "2x3090.yaml")
    assert inventory.engine is None


@pytest.mark.parametrize(
    ("name", "free_mib", "available_gib"),
    [
        ("1x3090", [24125], 190.0),
        ("2x3090-128g", [24125, 24125], 121.4),
        ("2x3090-64g", [24125, 24125], 60.0),
        ("4x3090-128g", [24125] * 4, 121.4),
        ("24+12", [24125, 11900], 120.0),
        ("1x16-32g", [15800], 28.0),
    ],
)
def test_golden_rigs(name: str, free_mib: list[int], available_gib: float) -> None:
    inventory = load_rig(RIGS / f"{name}.yaml")
    assert [(d.free_bytes or 0) // MIB for d in inventory.devices] == free_mib
    assert inventory.host.available_bytes == round(available_gib * GIB)


def test_what_may_be_left_out(tmp_path: Path) -> None:
    inventory = load_rig(
        write(tmp_path, "schema: 1\ndevices:\n- {name: Vulkan1, total: 8 GiB}\nhost: {total: 32GiB, cores: 6}\n")
    )
    (device,) = inventory.devices
    assert (device.backend, device.description, device.buffer_type) == ("vulkan", "Vulkan1", "Vulkan1")
    assert device.free_bytes == device.total_bytes == 8 * GIB
    assert (device.context_bytes, device.memory_bps, device.link_bps) == (None, None, None)
    assert inventory.host.available_bytes == 32 * GIB
    assert (inventory.host.triad_bps, inventory.host.numa_nodes) == (None, 1)


NODES = """schema: 1
devices: [{name: CUDA0, total: 24GiB, numa_node: 1}]
host:
  total: 256GiB
  cores: 64
  triad_gbps: 300
  interleave_gbps: 210
  numa_nodes:
    - {node: 2, total: 128GiB, available: 120GiB, cores: 32, socket: 1, bind_gbps: 150}
    - {node: 0, total: 128GiB, cores: 32, socket: 0}
"""


def test_nodes_with_their_memory(tmp_path: Path) -> None:
    inventory = load_rig(write(tmp_path, NODES))
    host = inventory.host
    assert inventory.devices[0].numa_node == 1
    assert (host.numa_nodes, host.available_bytes) == (2, 248 * GIB)  # what the nodes have, not all of the total
    assert [(n.index, n.available_bytes // GIB, n.cores, n.socket, n.bps) for n in host.nodes] == [
        (0, 128, 32, 0, None), (2, 120, 32, 1, 150e9),
    ]  # fmt: skip
    assert (host.interleave_bps, host.distribute_bps) == (210e9, None)


def test_a_count_of_nodes_says_nothing_about_their_memory(tmp_path: Path) -> None:
    text = "schema: 1\ndevices: []\nhost: {total: 64GiB, cores: 8, numa_nodes: 2}\n"
    host = load_rig(write(tmp_path, text)).host
    assert (host.numa_nodes, host.nodes, host.available_bytes) == (2, (), 64 * GIB)


def test_what_is_wrong_with_nodes(tmp_path: Path) -> None:
    text = NODES.replace("node: 0,", "node: 2,").replace("available: 120GiB", "available: 129GiB, core: 1")
    found = "\n".join(problems(tmp_path, text.replace("cores: 32, socket: 0", "socket: 0")))
    assert "host.numa_nodes[1].node: node 2 is given twice" in found
    assert "host.numa_nodes[0].available: more than total" in found
    assert "unknown key 'core', did you mean 'cores'?" in found
    assert "missing key 'host.numa_nodes[1].cores'" in found
    more = problems(tmp_path, NODES.replace("total: 256GiB", "total: 255GiB\n  available: 250GiB"))
    assert [line.partition("host.")[2] for line in more] == [
        "available: more than the 248.0 GiB that its nodes have available",
        "numa_nodes: 256.0 GiB in all, more than host.total, 255.0 GiB",
    ]
    empty = problems(tmp_path, "schema: 1\ndevices: []\nhost: {total: 64GiB, cores: 8, numa_nodes: []}\n")
    assert "host.numa_nodes: an empty list" in empty[0]


def test_an_rpc_device_has_its_endpoint(tmp_path: Path) -> None:
    text = 'schema: 1\ndevices: [{name: RPC1, buffer_type: "RPC0[10.0.0.5:50052]", total: 8GiB}]\n'
    (device,) = load_rig(write(tmp_path, text + "host: {total: 1GiB, cores: 1}\n")).devices
    assert (device.backend, device.buffer_type, device.endpoint) == ("rpc", "RPC0[10.0.0.5:50052]", "10.0.0.5:50052")


def test_a_rig_without_devices(tmp_path: Path) -> None:
    assert load_rig(write(tmp_path, "schema: 1\ndevices: []\nhost: {total: 1GiB, cores: 1}\n")).devices == ()


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "schema: 1\n"
        "devices:\n"
        "  - {name: CUDA0, total: 24 GPU, memory_gbps: fast}\n"
        "  - {name: CUDA0, total: 8GiB, free: 9GiB, linkgbps: 25}\n"
        "  - CUDA2\n"
        "host: {total: 64GiB, available: 65GiB, cores: 0}\n",
    )
    assert [p.split(" ", 1)[0] for p in found] == [
        "3:26:", "3:47:", "4:12:", "4:38:", "4:44:", "5:5:", "6:33:", "6:47:",
    ]  # fmt: skip
    text = "\n".join(found)
    assert "devices[1].name: CUDA0 is named twice" in text
    assert "devices[0].total: not a size: '24 GPU'" in text
    assert "devices[0].memory_gbps: expected a number, found 'fast'" in text
    assert "unknown key 'linkgbps', did you mean 'link_gbps'?" in text
    assert "devices[1].free: more than total" in text
    assert "devices[2]: expected a mapping, as in {name: value}, found 'CUDA2'" in text
    assert "host.available: more than total" in text
    assert "host.cores: 0 is not from 1 to 4,096" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("schema: 1\n", "1:1: missing key 'devices'"),
        ("schema: 1\ndevices: {CUDA0: 1}\n", "2:10: devices: expected a list of mappings, found a mapping"),
        ("schema: 1\ndevices: []\nhost: 64GiB\n", "3:7: host: expected a mapping, as in {name: value}, found '64GiB'"),
        ("schema: 1\ndevices: [{name: RTX 3090, total: 1}]\n", "2:18: devices[0].name: expected the engine's name, as"),
        ("schema: 1\ndevices: [{name: CUDA0, total: 99999999999999TB}]\n", "more memory than any machine has"),
        ("schema: 1\ndevices: [{name: CUDA0, total: -1}]\n", "2:32: devices[0].total: not a size: '-1'"),
        ("schema: 1\ndevices: [{name: CUDA0, total: 1, link_gbps: nan}]\n", "link_gbps: nan is not from"),
    ],
)
def test_single_problems(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in "\n".join(problems(tmp_path, text))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SlugInvalid, match="rig file .*no-such.yaml has 1 problem") as e:
        load_rig(tmp_path / "no-such.yaml")
    assert "cannot be read: No such file or directory" in e.value.context
