"""devices.py, nvml.py and rpc.py: lists and cards joined, endpoints checked over real sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from launcher.errors import DeviceUnusable
from launcher.facts import nvml, rpc
from launcher.facts.devices import (
    ListedDevice,
    NvmlCard,
    loopback_devices,
    merge,
    nvml_cards,
    parse_list_devices,
    read_devices,
    visible_cards,
)
from launcher.facts.nvml import driver_trouble
from launcher.structs import Device, Engine, GpuProcess, Host
from launcher.units import GIB, MIB

CAPTURED = Path(__file__).parents[1] / "captured"
HOST = Host(total_bytes=196 * GIB, available_bytes=190 * GIB, limited_by="MemAvailable", cores=32)


def card(index: int = 0, **fields: Any) -> NvmlCard:
    known: dict[str, Any] = {
        "uuid": f"GPU-{index}f0da944-0000", "pci": f"0000:0{index + 1}:00.0", "name": "NVIDIA GeForce RTX 3090",
        "total_bytes": 24576 * MIB, "free_bytes": 24125 * MIB, "link_bps": 25e9, "memory_bps": 936e9,
    }  # fmt: skip
    return NvmlCard(index=index, **{**known, **fields})


def listed(name: str, total_mib: int, free_mib: int, description: str = "NVIDIA GeForce RTX 3090") -> ListedDevice:
    return ListedDevice(name=name, description=description, total_bytes=total_mib * MIB, free_bytes=free_mib * MIB)


# ------------------------------------------------------------------------------------- --list-devices


def test_lines_of_the_engine() -> None:
    rpc_devices = parse_list_devices((CAPTURED / "list_devices_rpc.txt").read_text())
    assert [(d.name, d.description, d.backend) for d in rpc_devices] == [
        ("RPC0", "127.0.0.1:47311", "rpc"),
        ("RPC1", "127.0.0.1:47312", "rpc"),
    ]
    assert rpc_devices[0].total_bytes == rpc_devices[0].free_bytes == 24105 * MIB
    cuda = parse_list_devices((CAPTURED / "list_devices_cuda_virtual.txt").read_text())
    assert (cuda[1].name, cuda[1].description) == ("CUDA1", "NVIDIA H200 (dev p0/v1)")
    assert (cuda[1].total_bytes, cuda[1].free_bytes) == (71577 * MIB, 71314 * MIB)


def test_no_devices_and_noise() -> None:
    assert parse_list_devices("Available devices:\n  (none)\n") == ()
    assert parse_list_devices("ggml_cuda_init: found 1 CUDA devices:\n  Device 0: NVIDIA, compute 8.6\n") == ()


def test_a_description_with_brackets_is_kept_whole() -> None:
    (one,) = parse_list_devices("  Vulkan0: AMD Radeon 780M (RADV PHOENIX) (16180 MiB, 15995 MiB free)\n")
    assert one.description == "AMD Radeon 780M (RADV PHOENIX)"


# ---------------------------------------------------------------------------------------------- NVML


class Nvml:
    """pynvml's functions over plain data; an Exception in the data is raised."""

    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVML_CLOCK_MEM = pynvml.NVML_CLOCK_MEM

    def __init__(self, *cards: Mapping[str, Any], init: Exception | None = None) -> None:
        self.cards, self.init, self.shut = list(cards), init, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init:
            raise self.init

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut += 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Mapping[str, Any]:  # noqa: N802
        return self._get(self.cards[index], "self", self.cards[index])

    def nvmlSystemGetProcessName(self, pid: int) -> str:  # noqa: N802
        for one in self.cards:
            for process in one.get("processes", ()):
                if process["pid"] == pid:
                    return str(self._get(process, "name"))
        raise pynvml.NVMLError_NotFound()

    @staticmethod
    def _get(data: Mapping[str, Any], key: str, default: Any = None) -> Any:
        value = data.get(key, default)
        if isinstance(value, Exception):
            raise value
        return value

    def __getattr__(self, name: str) -> Any:
        key = {
            "nvmlDeviceGetUUID": "uuid", "nvmlDeviceGetName": "name", "nvmlDeviceGetMigMode": "mig",
            "nvmlDeviceGetMaxPcieLinkGeneration": "gen_max", "nvmlDeviceGetCurrPcieLinkGeneration": "gen",
            "nvmlDeviceGetMaxPcieLinkWidth": "width_max", "nvmlDeviceGetCurrPcieLinkWidth": "width",
            "nvmlDeviceGetMemoryBusWidth": "memory_bus_bits", "nvmlDeviceGetMaxClockInfo": "memory_clock_mhz",
            "nvmlDeviceGetPciInfo": "busId", "nvmlDeviceGetMemoryInfo": "total",
            "nvmlDeviceGetComputeRunningProcesses": "processes", "nvmlDeviceGetMaxMigDeviceCount": "slices",
            "nvmlDeviceGetMigDeviceHandleByIndex": "slices",
        }[name]  # fmt: skip

        def ask(handle: Mapping[str, Any], *args: int) -> Any:
            value = self._get(handle, key, ())
            if name == "nvmlDeviceGetPciInfo":
                return SimpleNamespace(busId=value)
            if name == "nvmlDeviceGetMemoryInfo":
                return SimpleNamespace(total=value, free=handle["free"])
            if name == "nvmlDeviceGetComputeRunningProcesses":
                return [SimpleNamespace(pid=p["pid"], usedGpuMemory=p["used"]) for p in value]
            if name == "nvmlDeviceGetMaxMigDeviceCount":
                return 7
            if name == "nvmlDeviceGetMigDeviceHandleByIndex":
                if args[0] >= len(value):
                    raise pynvml.NVMLError_NotFound()
                return value[args[0]]
            return value

        return ask


def h200(**changes: Any) -> dict[str, Any]:
    return {**json.loads((CAPTURED / "nvml_h200.json").read_text()), **changes}


def test_a_card_as_nvml_gave_it() -> None:
    nvml = Nvml(h200())
    (found,) = nvml_cards(nvml)
    assert (found.uuid, found.pci) == ("GPU-f0da9443-163b-af98-fe97-f62dc98eb223", "0000:00:06.0")
    assert (found.total_bytes, found.free_bytes, found.note) == (150754820096, 148483735552, "")
    assert found.processes == (GpuProcess(pid=412, name="python3.12", used_bytes=1616904192),)
    assert found.link_bps == pytest.approx(50.4e9, rel=0.01)  # 5.0 x16: 63 GB/s on the wire
    assert found.memory_bps == pytest.approx(4.8e12, rel=0.01)  # the data sheet's 4.8 TB/s
    assert not found.mig and nvml.shut == 1


def test_no_driver_is_no_card() -> None:
    assert nvml_cards(Nvml(h200(), init=pynvml.NVMLError_LibraryNotFound())) == ()
    assert nvml_cards(Nvml(h200(), init=pynvml.NVMLError_DriverNotLoaded())) == ()


def test_what_nvml_will_not_say_is_unknown_not_zero() -> None:
    denied, unsupported = pynvml.NVMLError_NoPermission(), pynvml.NVMLError_NotSupported()
    (found,) = nvml_cards(
        Nvml(h200(total=denied, gen_max=unsupported, memory_bus_bits=unsupported, processes=denied, mig=unsupported))
    )
    assert (found.total_bytes, found.free_bytes, found.link_bps, found.memory_bps) == (None, None, None, None)
    assert found.processes == () and found.uuid
    assert "memory: Insufficient Permissions" in found.note
    devices, warnings = merge(None, (found,))
    assert devices[0].free_bytes is None
    assert warnings == (f"cannot read the free memory of CUDA0 (NVIDIA H200): {found.note}",)


def test_a_process_without_a_figure_or_a_name() -> None:
    other = {"pid": 7, "used": None, "name": pynvml.NVMLError_NotFound()}
    (found,) = nvml_cards(Nvml(h200(processes=[other])))
    assert found.processes == (GpuProcess(pid=7, name="", used_bytes=None),)


def test_a_lost_card_keeps_its_place() -> None:
    lost = {"self": pynvml.NVMLError_GpuIsLost()}
    cards = nvml_cards(Nvml(h200(), lost))
    assert [c.total_bytes for c in cards] == [150754820096, None]
    assert "handle: GPU is lost" in cards[1].note


def test_cards_come_in_pci_order() -> None:
    far, near = h200(busId="00000000:41:00.0", uuid="GPU-far"), h200(busId=b"00000000:01:00.0", uuid="GPU-near")
    cards = nvml_cards(Nvml(far, near))
    assert [(c.uuid, c.pci) for c in cards] == [("GPU-near", "0000:01:00.0"), ("GPU-far", "0000:41:00.0")]


def two_h200() -> list[dict[str, Any]]:
    """Two cards of one host; `free` is what was left of each while the rest was held."""
    return json.loads((CAPTURED / "nvml_two_h200.json").read_text())  # type: ignore[no-any-return]


def test_two_cards_come_in_pci_order_with_their_links() -> None:
    first, second = two_h200()
    cards = nvml_cards(Nvml(second, first))  # the driver's own order is not ours
    assert [(c.uuid, c.pci) for c in cards] == [(first["uuid"], "0000:00:06.0"), (second["uuid"], "0000:00:07.0")]
    assert [(c.link_gen, c.link_gen_max, c.link_width, c.link_width_max) for c in cards] == [(5, 5, 16, 16)] * 2
    assert [c.link_bps for c in cards] == [pytest.approx(50.4e9, rel=0.01)] * 2
    assert cards[0].memory_bps is None  # its clock was not captured: unknown, not 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_cards_named_in_another_order_are_devices_in_that_order(order: tuple[int, int]) -> None:
    cards = nvml_cards(Nvml(*two_h200()))
    env = {"CUDA_VISIBLE_DEVICES": ",".join(str(two_h200()[i]["uuid"]) for i in order)}
    expected = [(f"CUDA{n}", two_h200()[i]["uuid"], two_h200()[i]["free"]) for n, i in enumerate(order)]
    devices, warnings = read_devices(None, env=env, cards=cards)
    assert [(d.name, d.uuid, d.free_bytes) for d in devices] == expected and warnings == ()
    seen, _ = visible_cards(cards, env)
    lines = [listed(f"CUDA{n}", 143155, 100 + n, "NVIDIA H200") for n in range(2)]
    assert [(d.name, d.uuid, d.free_bytes) for d in merge(lines, seen)[0]] == expected


def test_a_card_that_is_cut_up_is_its_slices() -> None:
    slices = [h200(uuid=f"MIG-{i}", name="NVIDIA H200 MIG 1g.18gb", total=16 * GIB, free=15 * GIB) for i in range(2)]
    cards = nvml_cards(Nvml(h200(mig=[1, 1], slices=slices)))
    assert [(c.uuid, c.total_bytes, c.mig) for c in cards] == [("MIG-0", 16 * GIB, True), ("MIG-1", 16 * GIB, True)]
    seen, warnings = visible_cards(cards, {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert [c.uuid for c in seen] == ["MIG-1"] and warnings == ()
    one = listed("CUDA0", 16200, 15300, "NVIDIA H200 MIG 1g.18gb")
    devices, _ = merge([one], seen)
    assert (devices[0].uuid, devices[0].free_bytes) == ("MIG-1", 15 * GIB)
    assert visible_cards(cards, {})[1][0].startswith("MIG is on")


# -------------------------------------------------------------------------------- which cards are seen


@pytest.mark.parametrize(
    ("value", "seen", "warned"),
    [
        (None, [0, 1, 2], False),
        ("", [], False),
        ("-1", [], False),
        ("2,0", [2, 0], False),
        ("GPU-1f0da944-0000,GPU-0f", [1, 0], False),
        ("1,9,0", [1], True),
        ("GPU-", [], True),  # fits three
        ("1,1", [1], True),
    ],
)
def test_cuda_visible_devices(value: str | None, seen: list[int], warned: bool) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    found, warnings = visible_cards([card(0), card(1), card(2)], env)
    assert [c.index for c in found] == seen
    assert bool(warnings) is warned


# --------------------------------------------------------------------------------------------- merging


def test_free_memory_is_the_drivers_and_identity_too() -> None:
    cards = [card(0), card(1, free_bytes=20000 * MIB)]
    devices, warnings = merge([listed("CUDA0", 24123, 23800), listed("CUDA1", 24123, 19700)], cards)
    assert [(d.name, d.uuid, d.pci, d.free_bytes) for d in devices] == [
        ("CUDA0", "GPU-0f0da944-0000", "0000:01:00.0", 24125 * MIB),
        ("CUDA1", "GPU-1f0da944-0000", "0000:02:00.0", 20000 * MIB),
    ]
    assert devices[0].backend == "cuda" and devices[0].buffer_type == "CUDA0" and devices[0].total_bytes == 24576 * MIB
    assert (devices[0].link_bps, devices[0].memory_bps, warnings) == (25e9, 936e9, ())


def test_unequal_cards_are_matched_by_name_when_the_order_differs() -> None:
    cards = [card(0), card(1, name="NVIDIA GeForce RTX 5060 Ti", total_bytes=16311 * MIB, free_bytes=16000 * MIB)]
    ours = [listed("CUDA0", 15900, 15700, "NVIDIA GeForce RTX 5060 Ti"), listed("CUDA1", 24123, 23800)]
    devices, warnings = merge(ours, cards)
    assert [d.uuid for d in devices] == ["GPU-1f0da944-0000", "GPU-0f0da944-0000"] and warnings == ()


def test_one_card_of_the_driver_is_not_two_devices() -> None:
    """A container whose NVML shows one card of two: the second must not be given the first one's memory again."""
    ours = [listed("CUDA0", 24123, 23800), listed("CUDA1", 24123, 9000)]
    devices, warnings = merge(ours, [card(0)])
    assert [(d.uuid, d.free_bytes) for d in devices] == [
        ("GPU-0f0da944-0000", 24125 * MIB),
        (None, 9000 * MIB),
    ]
    assert warnings == ("CUDA1 (NVIDIA GeForce RTX 3090) matches no card of the driver: the engine's figures are used",)
    vulkan = [listed("Vulkan0", 24576, 24000), listed("Vulkan1", 24576, 9000)]
    assert [d.uuid for d in merge(vulkan, [card(0)])[0]] == [None, None]


def test_equal_cards_behind_another_one_are_told_apart_by_what_is_left() -> None:
    cards = [card(0), card(1), card(2, name="NVIDIA GeForce RTX 5060 Ti", total_bytes=16311 * MIB)]
    ours = [
        listed("CUDA0", 15900, 15700, "NVIDIA GeForce RTX 5060 Ti"),
        listed("CUDA1", 24123, 1), listed("CUDA2", 24123, 2),
    ]  # fmt: skip
    devices, warnings = merge(ours, cards)
    assert len({d.uuid for d in devices}) == 3 and warnings == ()


@pytest.mark.parametrize(
    ("value", "order"),
    [
        ("1,0", (1, 0)), (" 1 , 0 ", (1, 0)), ("GPU-1f0da944-0000,GPU-0", (1, 0)), ("gpu-1", (1,)), ("0,GPU-1", (0, 1)),
        ("1,7,0", (1,)), ("GPU-,0", ()), ("-1", ()), ("", ()), ("0,0", (0,)), ("x", ()), ("0;1", ()),
    ],
)  # fmt: skip
def test_what_a_person_shows_to_cuda_is_what_is_planned_with(value: str, order: tuple[int, ...]) -> None:
    seen, _ = visible_cards((card(0), card(1)), {"CUDA_VISIBLE_DEVICES": value})
    assert tuple(c.index for c in seen) == order
    lines = [listed(f"CUDA{i}", 24123, 23000 + i) for i in range(len(order))]
    assert [d.uuid for d in merge(lines, seen)[0]] == [f"GPU-{i}f0da944-0000" for i in order]


def test_a_device_that_matches_no_card_keeps_the_engines_figures() -> None:
    devices, warnings = merge([listed("CUDA0", 8000, 7000, "Tesla P4")], [card(0), card(1)])
    assert (devices[0].uuid, devices[0].free_bytes) == (None, 7000 * MIB)
    assert "matches no card" in warnings[0]


def test_an_engine_that_takes_host_memory_for_the_cards_is_not_believed() -> None:
    cards = [card(name="NVIDIA GeForce RTX 5090", total_bytes=32607 * MIB, free_bytes=32000 * MIB)]
    devices, warnings = merge([listed("CUDA0", 32106, 55372, "NVIDIA GeForce RTX 5090")], cards)
    assert devices[0].free_bytes == 32000 * MIB
    assert "54.1 GiB free of 31.4 GiB" in warnings[0] and "the driver 31.2 GiB" in warnings[0]
    devices, warnings = merge([listed("CUDA0", 32106, 55372, "NVIDIA GeForce RTX 5090")], [])
    assert devices[0].free_bytes is None and len(warnings) == 2


def test_an_engine_free_figure_far_above_the_drivers() -> None:
    cards = [card(free_bytes=10000 * MIB)]
    assert merge([listed("CUDA0", 24123, 10512)], cards)[1] == ()
    devices, warnings = merge([listed("CUDA0", 24123, 10513)], cards)
    assert devices[0].free_bytes == 10000 * MIB and len(warnings) == 1


def test_virtual_devices_share_a_card_and_take_memory_from_the_engine() -> None:
    h = card(name="NVIDIA H200", total_bytes=143771 * MIB, free_bytes=143156 * MIB)
    devices, warnings = merge(parse_list_devices((CAPTURED / "list_devices_cuda_virtual.txt").read_text()), [h])
    assert [(d.name, d.pci, d.uuid, d.free_bytes) for d in devices] == [
        ("CUDA0", "0000:01:00.0", None, 71314 * MIB),
        ("CUDA1", "0000:01:00.0", None, 71314 * MIB),
    ]
    assert warnings == ()


def test_integrated_and_software_devices_are_left_out() -> None:
    names = (
        "AMD Radeon Graphics (RADV RAPHAEL_MENDOCINO)", "AMD Radeon 780M (RADV PHOENIX)", "Intel(R) UHD Graphics 770",
        "Intel(R) Iris(R) Xe Graphics", "AMD Ryzen 7 5700G with Radeon Graphics (RADV RENOIR)",
        "llvmpipe (LLVM 15.0.7, 256 bits)", "Intel(R) Graphics (RPL-S)", "AMD Radeon(TM) Graphics",
    )  # fmt: skip
    discrete = (
        "NVIDIA GeForce RTX 5070 Ti", "AMD Radeon RX 7900 XTX (RADV NAVI31)", "Intel(R) Arc(TM) A770 Graphics (DG2)",
    )  # fmt: skip
    every = [listed(f"Vulkan{i}", 16180, 15995, name) for i, name in enumerate((*discrete, *names))]
    devices, warnings = merge(every, [card(name="NVIDIA GeForce RTX 5070 Ti", free_bytes=15500 * MIB)], host=HOST)
    assert [d.description for d in devices] == list(discrete)
    assert [w.split(" is left out")[0] for w in warnings] == [f"{d.name} ({d.description})" for d in every[3:]]
    assert devices[0].uuid and devices[0].free_bytes == 15500 * MIB  # the NVIDIA one has a driver to ask
    assert devices[1].uuid is None and devices[1].free_bytes == 15995 * MIB


def test_beside_cuda_no_other_backend_is_planned_with() -> None:
    every = [
        listed("CUDA0", 24123, 23800), listed("Vulkan0", 24576, 24000),
        listed("Vulkan1", 16180, 15995, "AMD Radeon RX 6800"), listed("BLAS", 0, 0, "OpenBLAS"),
    ]  # fmt: skip
    devices, warnings = merge(every, [card()])
    assert [d.name for d in devices] == ["CUDA0"]
    assert warnings == (
        "Vulkan0 (NVIDIA GeForce RTX 3090) is left out: the same card is there as a CUDA device",
        "Vulkan1 (AMD Radeon RX 6800) is left out: CUDA devices are there",
    )


def test_cards_that_the_engine_does_not_list() -> None:
    assert merge([], [card()]) == ((), ("1 NVIDIA card(s) here, but this engine lists none: a build without CUDA?",))


def test_without_an_engine_the_cards_get_cuda_names() -> None:
    devices, warnings = merge(None, [card(1), card(0)])
    assert [(d.name, d.uuid) for d in devices] == [("CUDA0", "GPU-1f0da944-0000"), ("CUDA1", "GPU-0f0da944-0000")]
    assert warnings == ()


def test_a_card_whose_driver_is_silent_takes_the_engines_figure() -> None:
    devices, warnings = merge([listed("CUDA0", 24123, 23800)], [card(total_bytes=None, free_bytes=None)])
    assert (devices[0].uuid, devices[0].total_bytes, devices[0].free_bytes) == (
        "GPU-0f0da944-0000", 24123 * MIB, 23800 * MIB,
    )  # fmt: skip
    assert warnings == ()


# ------------------------------------------------------------------------------------------------ RPC


@contextmanager
def endpoint(serve: str) -> Iterator[tuple[str, list[bytes]]]:
    """A listener that treats clients as an RPC server does: `free` reads to their end, `busy` never accepts."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server:

        def loop() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    seen.append(client.recv(64))

        if serve == "free":
            threading.Thread(target=loop, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}", seen
        server.shutdown(socket.SHUT_RDWR)


def test_a_free_endpoint_answers_at_once_and_is_told_nothing() -> None:
    with endpoint("free") as (name, seen):
        started = time.monotonic()
        rpc.check(name)
        assert time.monotonic() - started < 1
        assert seen == [b""]


def test_a_busy_endpoint_is_refused_however_often_it_is_asked() -> None:
    with endpoint("busy") as (name, _):
        for _ in range(4):  # the queue is full after two: connecting itself waits then
            with pytest.raises(DeviceUnusable, match="serves another client") as caught:
                rpc.check(name, timeout_s=0.2)
            assert caught.value.reference == "rpc-busy"


def test_nobody_there_names_the_server_to_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(DeviceUnusable, match=f"127.0.0.1:{port}") as caught:
        rpc.check(f"127.0.0.1:{port}")
    assert (caught.value.reference, caught.value.exit_code) == ("rpc-unreachable", 5)
    assert caught.value.fix.startswith(f"ggml-rpc-server -H 127.0.0.1 -p {port}")


@pytest.mark.parametrize(
    "text", ["", "50052", "host", "host:", ":50052", "host:x", "host:0", "host:65536", "::1:50052"]
)
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(DeviceUnusable) as caught:
        rpc.split(text)
    assert caught.value.reference == "rpc-endpoint-invalid"


def test_loopback() -> None:
    assert rpc.is_loopback("127.0.0.2:1") and rpc.is_loopback("localhost:1")
    assert not rpc.is_loopback("192.168.0.2:1") and not rpc.is_loopback("box:1")


def fake_engine(tmp_path: Path, body: str) -> Engine:
    """A script that lists devices; it leaves its arguments and two of its variables behind."""
    path = tmp_path / "llama-server"
    path.write_text(
        "#!/bin/sh\n"
        f'echo "$*;$CUDA_DEVICE_ORDER;${{CUDA_VISIBLE_DEVICES-unset}};$LLAMA_ARG_RPC" >> {tmp_path}/calls\n{body}\n'
    )
    path.chmod(0o755)
    return Engine(path=str(path), version="1", digest="0", found_by="--engine")


def device(name: str, at: str) -> Device:
    return Device(
        name=name, buffer_type=f"RPC0[{at}]", backend="rpc", description=at,
        total_bytes=8 * GIB, free_bytes=8 * GIB, endpoint=at,
    )  # fmt: skip


def test_rpc_devices_are_numbered_through_and_a_busy_endpoint_is_never_asked(tmp_path: Path) -> None:
    with endpoint("free") as (free, _), endpoint("busy") as (busy, asked):
        engine = fake_engine(
            tmp_path,
            f'case "$1" in --rpc) echo "Available devices:"\n echo "  CUDA0: x (9 MiB, 9 MiB free)"\n'
            f' echo "  RPC0: {free} (16384 MiB, 16000 MiB free)"\n'
            f' echo "  RPC1: {free} (8192 MiB, 8000 MiB free)" ;; esac',
        )
        devices, _ = read_devices(
            engine,
            env={"LLAMA_ARG_RPC": "evil:1", "PATH": "/usr/bin:/bin"},
            rpc_hosts=(busy, free),
            busy_endpoints={busy: (device("RPC1", busy),)},
            cards=(),
        )
        assert asked == []
    assert [(d.name, d.buffer_type, d.endpoint) for d in devices] == [
        ("RPC0", f"RPC0[{busy}]", busy),
        ("RPC1", f"RPC0[{free}]", free),
        ("RPC2", f"RPC1[{free}]", free),
    ]
    assert not any(d.shares_host for d in devices)  # no device of the host's own size
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"--rpc {free} --list-devices;PCI_BUS_ID;;", "--list-devices;PCI_BUS_ID;unset;"]


def test_a_cpu_server_on_loopback_shares_the_hosts_memory(tmp_path: Path) -> None:
    from launcher.facts.host import read_host

    here = read_host()
    mib = here.total_bytes // MIB
    with endpoint("free") as (free, _):
        line = f'case "$1" in --rpc) echo "  RPC0: {free} ({mib} MiB, {mib} MiB free)" ;; esac'
        (only,), _ = read_devices(fake_engine(tmp_path, line), env={}, rpc_hosts=(free,), cards=())
    assert only.shares_host and only.free_bytes is not None
    assert only.free_bytes < here.total_bytes  # not all of it, as the server says
    assert only.free_bytes == pytest.approx(here.available_bytes, rel=0.1)


def test_an_endpoint_that_the_engine_cannot_use(tmp_path: Path) -> None:
    body = 'case "$1" in --rpc) echo "RPC server version mismatch: 3.6.1" >&2; exit 134 ;; esac'
    with endpoint("free") as (free, _), pytest.raises(DeviceUnusable) as caught:
        read_devices(fake_engine(tmp_path, body), env={}, rpc_hosts=(free,), cards=())
    assert caught.value.reference == "rpc-failed" and "version mismatch" in caught.value.context


def test_an_engine_that_cannot_list(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnusable) as caught:
        read_devices(fake_engine(tmp_path, "echo boom >&2; exit 3"), env={}, cards=())
    assert (caught.value.reference, caught.value.context) == ("engine-list-failed", "boom")


def test_an_engine_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrapper script's real engine would otherwise live on and hold its cards."""
    monkeypatch.setattr("launcher.facts.devices._LIST_TIMEOUT_S", 0.5)
    body = f"sleep 60 &\necho $! > {tmp_path}/pid\nwait"
    with pytest.raises(DeviceUnusable) as caught:
        read_devices(fake_engine(tmp_path, body), env={"PATH": "/usr/bin:/bin"}, cards=())
    assert caught.value.reference == "engine-list-failed" and "no answer in 0.5 s" in caught.value.message
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.02)
    pytest.fail(f"{pid} is still there")


def test_an_engine_that_lists_noise_gives_no_devices(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 400 + b"\n  CUDA0: broken (12 MiB, free)\n  CUDA1: x (MiB)\n")
    engine = fake_engine(tmp_path, f"cat {tmp_path}/noise")
    devices, warnings = read_devices(engine, env={"PATH": "/usr/bin:/bin"}, cards=(card(),))
    assert devices == () and warnings == ("1 NVIDIA card(s) here, but this engine lists none: a build without CUDA?",)


def test_a_driver_that_does_not_answer_says_so() -> None:
    mismatch = driver_trouble(Nvml(init=pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)))
    assert "version mismatch" in mismatch.lower() and "nvidia-smi" in mismatch
    assert driver_trouble(Nvml(init=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))) == ""
    good = Nvml()
    assert driver_trouble(good) == "" and good.shut == 1


def test_without_an_engine_rpc_is_left_out() -> None:
    devices, warnings = read_devices(None, env={}, rpc_hosts=("127.0.0.1:50052",), cards=(card(),))
    assert [d.name for d in devices] == ["CUDA0"] and "127.0.0.1:50052" in warnings[-1]


def test_beside_a_full_card_the_engine_is_not_asked(tmp_path: Path) -> None:
    cards = (card(0), card(1, free_bytes=845 * MIB))
    devices, warnings = read_devices(fake_engine(tmp_path, "exit 3"), env={}, cards=cards)
    assert [(d.name, d.free_bytes) for d in devices] == [("CUDA0", 24125 * MIB), ("CUDA1", 845 * MIB)]
    assert not (tmp_path / "calls").exists() and "845.0 MiB free" in warnings[-1]


def test_devices_of_servers_that_are_not_started_yet() -> None:
    first, second = loopback_devices(("127.0.0.1:50052", "127.0.0.1:50053"), HOST, 2 * GIB)
    assert (first.name, first.buffer_type, first.free_bytes) == ("RPC0", "RPC0[127.0.0.1:50052]", 2 * GIB)
    assert (second.name, second.buffer_type, second.shares_host) == ("RPC1", "RPC0[127.0.0.1:50053]", True)
    (tight,) = loopback_devices(("127.0.0.1:50052",), replace(HOST, available_bytes=GIB), 2 * GIB)
    assert tight.free_bytes == GIB


# ------------------------------------------------------------------------------------------ kept lists

TWO = (
    'echo "Available devices:"\necho "  CUDA0: NVIDIA GeForce RTX 3090 (24123 MiB, 23900 MiB free)"\n'
    'echo "  CUDA1: NVIDIA GeForce RTX 3090 (24123 MiB, 23900 MiB free)"'
)
ENV = {"PATH": "/usr/bin:/bin"}


def times_asked(tmp_path: Path) -> int:
    calls = tmp_path / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def test_a_list_of_cards_is_asked_for_once_and_what_is_free_is_the_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.159.04")
    engine = fake_engine(tmp_path, TWO)
    first, _ = read_devices(engine, env=ENV, cards=(card(0), card(1)))
    again, warnings = read_devices(engine, env=ENV, cards=(card(0), card(1, free_bytes=9000 * MIB)))
    assert times_asked(tmp_path) == 1
    assert [d.free_bytes for d in first] == [24125 * MIB, 24125 * MIB]
    assert [d.free_bytes for d in again] == [24125 * MIB, 9000 * MIB]
    assert ([d.name for d in again], warnings) == (["CUDA0", "CUDA1"], ())
    assert [replace(d, free_bytes=0) for d in again] == [replace(d, free_bytes=0) for d in first]


@pytest.mark.parametrize(
    ("changed", "driver", "env"),
    [
        ((card(0), card(2)), "580.159.04", ENV),
        ((card(1), card(0)), "580.159.04", ENV),
        ((card(0), card(1)), "590.10", ENV),
        ((card(0), card(1)), "", ENV),
        ((card(0), card(1)), "580.159.04", {**ENV, "GGML_CUDA_DEVICES": "2"}),
        ((card(0), card(1)), "580.159.04", {**ENV, "CUDA_VISIBLE_DEVICES": "0,1"}),
        ((card(0), card(1, free_bytes=None)), "580.159.04", ENV),
    ],
    ids=["another card", "another order", "another driver", "no driver", "virtual", "visible", "free unknown"],
)
def test_whatever_decides_the_list_makes_it_be_asked_for_again(
    changed: tuple[NvmlCard, ...], driver: str, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.159.04")
    engine = fake_engine(tmp_path, TWO)
    read_devices(engine, env=ENV, cards=(card(0), card(1)))
    read_devices(replace(engine, digest="1"), env=ENV, cards=(card(0), card(1)))
    assert times_asked(tmp_path) == 2
    monkeypatch.setattr(nvml, "driver_version", lambda: driver)
    read_devices(engine, env=env, cards=changed)
    assert times_asked(tmp_path) == 3


@pytest.mark.parametrize(
    "body",
    [
        TWO + '\necho "  Vulkan0: NVIDIA GeForce RTX 3060 (12000 MiB, 11000 MiB free)"',
        TWO.replace("RTX 3090 (24123", "RTX 3090 (dev p0/v0) (24123"),
        TWO.splitlines()[0],
    ],
    ids=["another backend", "virtual devices", "no card"],
)
def test_a_list_that_says_more_than_the_driver_is_asked_for_each_time(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.159.04")
    engine = fake_engine(tmp_path, body)
    for _ in range(2):
        read_devices(engine, env=ENV, cards=(card(0), card(1)))
    assert times_asked(tmp_path) == 2
