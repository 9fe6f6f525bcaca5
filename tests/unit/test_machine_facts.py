"""cpu.py, memory.py and private.py: fabricated /proc, /sys and udev files, and text as dmidecode prints it."""

from __future__ import annotations

import os
import pwd
import socket
from pathlib import Path

import pytest

from launcher.facts import cpu, memory, private
from launcher.structs import Channels
from launcher.units import GIB


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# -------------------------------------------------------------------------------------------- processor


def test_the_processor_of_x86_and_of_a_board(tmp_path: Path) -> None:
    x86 = put(tmp_path / "a", {"proc/cpuinfo": "processor\t: 0\nmodel\t: 17\nmodel name\t: AMD  EPYC 9354\n"})
    assert cpu.processor(x86) == "AMD EPYC 9354"
    arm = {"proc/cpuinfo": "processor\t: 0\nCPU part\t: 0xd0c\n", "proc/device-tree/model": "Jetson AGX Orin\0"}
    assert cpu.processor(put(tmp_path / "b", arm)) == "Jetson AGX Orin"
    assert cpu.processor(tmp_path / "nothing") is None


def test_governors_of_all_cpus_each_once(tmp_path: Path) -> None:
    name = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
    files = {name.format(0): "schedutil\n", name.format(1): "performance\n", name.format(10): "performance\n"}
    assert cpu.governors(put(tmp_path, files)) == ("performance", "schedutil")
    assert cpu.governors(tmp_path / "virtual") is None


# ----------------------------------------------------------------------------------------------- memory


def test_no_swap_is_zero_and_untold_swap_is_unknown(tmp_path: Path) -> None:
    told = put(tmp_path / "a", {"proc/meminfo": "MemTotal: 9 kB\nSwapTotal: 8388608 kB\nSwapFree: 4194304 kB\n"})
    assert memory.swap(told) == (8 * GIB, 4 * GIB)
    none = put(tmp_path / "b", {"proc/meminfo": "SwapTotal: 0 kB\nSwapFree: 0 kB\n"})
    assert memory.swap(none) == (0, 0)
    assert memory.swap(tmp_path / "c") == (None, None)


def test_the_mode_of_huge_pages_is_the_one_in_brackets(tmp_path: Path) -> None:
    name = "sys/kernel/mm/transparent_hugepage/enabled"
    assert memory.transparent_huge(put(tmp_path, {name: "always [madvise] never\n"})) == "madvise"
    assert memory.transparent_huge(tmp_path / "c") is None


def edac(mc: int, dimm: int, size: int, place: str) -> dict[str, str]:
    folder = f"sys/devices/system/edac/mc/mc{mc}/dimm{dimm}"
    return {f"{folder}/size": f"{size}\n", f"{folder}/dimm_location": f"{place} \n"}


def test_channels_by_edac_count_those_with_a_module(tmp_path: Path) -> None:
    files = {
        **edac(0, 0, 16384, "channel 0 slot 0"),
        **edac(0, 1, 16384, "channel 0 slot 1"),  # the same channel
        **edac(0, 3, 0, "channel 1 slot 0"),  # an empty slot
        **edac(1, 0, 16384, "channel 0 slot 0"),  # the other controller
    }
    assert memory.channels(put(tmp_path, files)) == Channels(populated=2, modules=3, by="EDAC")


UDEV = """E:MEMORY_ARRAY_NUM_DEVICES=4
E:MEMORY_DEVICE_0_SIZE=34359738368
E:MEMORY_DEVICE_0_LOCATOR=DIMM 0
E:MEMORY_DEVICE_0_BANK_LOCATOR=P0 CHANNEL A
E:MEMORY_DEVICE_1_PRESENT=0
E:MEMORY_DEVICE_1_BANK_LOCATOR=P0 CHANNEL A
E:MEMORY_DEVICE_2_SIZE=34359738368
E:MEMORY_DEVICE_2_BANK_LOCATOR=P0 CHANNEL B
E:MEMORY_DEVICE_3_SIZE=34359738368
E:MEMORY_DEVICE_3_BANK_LOCATOR=P1 CHANNEL A
"""
DMIDECODE = """# dmidecode 3.3
Handle 0x0011, DMI type 17, 92 bytes
Memory Device
\tSize: 16 GB
\tLocator: ChannelA-DIMM0
\tBank Locator: BANK 0

Handle 0x0012, DMI type 17, 92 bytes
Memory Device
\tSize: No Module Installed
\tLocator: ChannelA-DIMM1

Handle 0x0013, DMI type 17, 92 bytes
Memory Device
\tSize: 16384 MB
\tLocator: {second}
\tBank Locator: BANK 2
"""


def test_channels_by_udev_need_no_root(tmp_path: Path) -> None:
    root = put(tmp_path, {"run/udev/data/+dmi:id": UDEV})
    assert memory.channels(root) == Channels(populated=3, modules=3, by="udev")


def test_channels_by_dmidecode(tmp_path: Path) -> None:
    said = DMIDECODE.format(second="ChannelB-DIMM0")
    assert memory.channels(tmp_path, said) == Channels(populated=2, modules=2, by="dmidecode")
    assert memory.parse_dmidecode(DMIDECODE.format(second="ChannelA-DIMM1")) == Channels(
        populated=1, modules=2, by="dmidecode"
    )


def test_modules_without_a_channels_name_leave_the_channels_unknown() -> None:
    assert memory.parse_dmidecode(DMIDECODE.format(second="DIMM_B1")) == Channels(
        populated=None, modules=2, by="dmidecode"
    )


def test_nobody_tells_the_channels(tmp_path: Path) -> None:
    assert memory.channels(tmp_path, "") is None
    assert memory.channels(tmp_path, "# dmidecode 3.3\n/dev/mem: Permission denied\n") is None


# ---------------------------------------------------------------------------------------------- private


def entry(name: str, folder: str) -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", 1, 1, "", folder, "/bin/sh"))


def test_who_this_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: entry("alice", "/home/alice"))
    monkeypatch.setattr(socket, "gethostname", lambda: "tower.lab.example")
    found = private.private(env={"HOME": "/data/alice/"})
    assert (found.home, found.user) == ("/data/alice", "alice")
    assert {"tower.lab.example", "tower", os.uname().nodename} <= {*found.hosts, "localhost"}
    assert private.private(env={}).home == "/home/alice"


def test_a_number_without_an_account_and_root_name_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_uid: int) -> pwd.struct_passwd:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert (private.private(env={}).home, private.private(env={}).user) == ("", "")
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: entry("root", "/"))
    assert (private.private(env={}).home, private.private(env={}).user) == ("", "")


@pytest.mark.parametrize(
    ("words", "secrets"),
    [
        (("llama-server", "--api-key", "k1", "-c", "9"), ("k1",)),
        (("llama-server", "--api-key=k1,k2"), ("k1,k2",)),
        (("llama-server", "-hft", "hf_x", "--hf-token", "hf_y"), ("hf_x", "hf_y")),
        (("llama-server", "--api-key-file", "/keys", "-ctk", "f16", "--override-kv", "a=int:1"), ()),
    ],
)
def test_secrets_of_a_command_line(words: tuple[str, ...], secrets: tuple[str, ...]) -> None:
    assert private.secret_words(words) == secrets


def test_secrets_of_environments() -> None:
    found = private.private(
        [("x", "--api-key", "one,two2")],
        [{"LLAMA_API_KEY": "abc", "CUDA_VISIBLE_DEVICES": "0"}],
        {"HF_TOKEN": "hf_0123456789", "REQUIRE_AUTH": "true", "WEIGHT_KEY": "llamacpp/smol-moe"},
    )
    assert found.literals == ("hf_0123456789", "one,two2", "two2")  # longest first, so that none is cut in half
    assert found.words == {"one,two2", "abc"}
