"""host.py over trees of fake /proc and /sys files, and over the real machine once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launcher.errors import DeviceUnusable
from launcher.facts import host
from launcher.units import GIB, MIB

MEMINFO = """MemTotal:       65536000 kB
MemFree:         1048576 kB
MemAvailable:   41943040 kB
Buffers:          204800 kB
Cached:         38797312 kB
HugePages_Total:       0
"""


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(path: str = "/user.slice/app.scope", mount_root: str = "/") -> dict[str, str]:
    return {
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": f"32 23 0:28 {mount_root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n",
    }


def topology(cpus: dict[int, tuple[int, int]]) -> dict[str, str]:
    files = {}
    for cpu, (package, core) in cpus.items():
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{folder}/physical_package_id"] = f"{package}\n"
        files[f"{folder}/core_id"] = f"{core}\n"
    return files


def test_page_cache_counts_as_available(tmp_path: Path) -> None:
    found = host.read_host(tree(tmp_path, {}), frozenset({0}))
    assert found.available_bytes == 40 * GIB  # MemAvailable, not the 1 GiB of MemFree
    assert found.total_bytes == 65536000 * 1024
    assert (found.limited_by, found.wsl, found.numa_nodes) == ("MemAvailable", False, 1)


def test_a_group_leaves_its_limit_less_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user.slice/app.scope"
    files = {
        **v2(),
        f"{group}/memory.max": f"{10 * GIB}\n",
        f"{group}/memory.current": f"{9 * GIB}\n",
        f"{group}/memory.stat": f"anon {2 * GIB}\ninactive_file {6 * GIB}\nactive_file {GIB}\n",
    }
    found = host.read_host(tree(tmp_path, files), frozenset({0}))
    assert found.available_bytes == 7 * GIB
    assert found.limited_by == "/sys/fs/cgroup/user.slice/app.scope/memory.max"


def test_the_tightest_group_on_the_way_up_binds(tmp_path: Path) -> None:
    files = {
        **v2(),
        "sys/fs/cgroup/user.slice/app.scope/memory.max": "max\n",
        "sys/fs/cgroup/user.slice/app.scope/memory.high": "max\n",
        "sys/fs/cgroup/user.slice/memory.max": f"{32 * GIB}\n",
        "sys/fs/cgroup/user.slice/memory.high": f"{20 * GIB}\n",
        "sys/fs/cgroup/user.slice/memory.current": f"{4 * GIB}\n",
    }
    rooms = host.memory_rooms(tree(tmp_path, files))
    assert [(r.file, r.left_bytes) for r in rooms] == [
        ("/sys/fs/cgroup/user.slice/memory.max", 28 * GIB),
        ("/sys/fs/cgroup/user.slice/memory.high", 16 * GIB),
    ]
    assert host.read_host(tmp_path, frozenset({0})).available_bytes == 16 * GIB


def test_a_limit_above_the_machine_protects_nothing(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user.slice/app.scope"
    files = {**v2(), f"{group}/memory.max": f"{512 * GIB}\n", f"{group}/memory.current": "0\n"}
    found = host.read_host(tree(tmp_path, files), frozenset({0}))
    assert (found.available_bytes, found.limited_by) == (40 * GIB, "MemAvailable")


def test_version_1_groups_and_their_way_of_writing_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n",
        "proc/self/mountinfo": (
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        ),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{30 * GIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
        "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "350000\n",
        "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000\n",
        **topology({i: (0, i) for i in range(8)}),
    }
    found = host.read_host(tree(tmp_path, files), frozenset(range(8)))
    assert found.available_bytes == 6 * GIB
    assert found.limited_by == "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes"
    assert found.cores == 3


def test_a_container_that_sees_the_hosts_path_reads_its_own_mount(tmp_path: Path) -> None:
    files = {
        **v2(path="/docker/abc", mount_root="/docker/abc"),
        "sys/fs/cgroup/memory.max": f"{6 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
    }
    found = host.read_host(tree(tmp_path, files), frozenset({0}))
    assert (found.available_bytes, found.limited_by) == (5 * GIB, "/sys/fs/cgroup/memory.max")


def test_a_full_group_leaves_nothing_rather_than_less(tmp_path: Path) -> None:
    files = {**v2("/a"), "sys/fs/cgroup/a/memory.max": f"{GIB}\n", "sys/fs/cgroup/a/memory.current": f"{2 * GIB}\n"}
    assert host.read_host(tree(tmp_path, files), frozenset({0})).available_bytes == 0


def test_hyperthreads_share_a_core(tmp_path: Path) -> None:
    cpus = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (0, 0), 5: (0, 1), 6: (1, 0), 7: (1, 1)}
    root = tree(tmp_path, topology(cpus))
    assert host.read_host(root, frozenset(range(8))).cores == 4
    assert host.read_host(root, frozenset({0, 4})).cores == 1
    assert host.read_host(root, frozenset({2, 3, 6})).cores == 2


def test_only_performance_cores_count_on_a_hybrid(tmp_path: Path) -> None:
    cpus = {**{i: (0, i // 2) for i in range(8)}, **{i: (0, 100 + i) for i in range(8, 16)}}
    root = tree(tmp_path, {**topology(cpus), "sys/devices/cpu_core/cpus": "0-7\n"})
    assert host.read_host(root, frozenset(range(16))).cores == 4
    assert host.read_host(root, frozenset(range(8, 16))).cores == 8  # pinned to the small ones: then those


def test_a_quota_lowers_the_cores_but_never_to_zero(tmp_path: Path) -> None:
    files = {**v2("/a/b"), **topology({i: (0, i) for i in range(4)})}
    tree(tmp_path, {**files, "sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"})
    assert host.read_host(tmp_path, frozenset(range(4))).cores == 2
    tree(tmp_path, {**files, "sys/fs/cgroup/a/b/cpu.max": "20000 100000\n"})
    assert host.read_host(tmp_path, frozenset(range(4))).cores == 1


def test_numa_nodes_without_memory_do_not_count(tmp_path: Path) -> None:
    nodes = {
        f"sys/devices/system/node/node{i}/meminfo": f"Node {i} MemTotal: {kb} kB\n" for i, kb in enumerate((9, 0, 9))
    }
    assert host.read_host(tree(tmp_path, nodes), frozenset({0})).numa_nodes == 2


def test_wsl_is_seen(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n"})
    assert host.read_host(root, frozenset({0})).wsl


def test_no_proc_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnusable, match="how much memory") as caught:
        host.read_host(tmp_path, frozenset({0}))
    assert (caught.value.reference, caught.value.exit_code) == ("host-unreadable", 5)


def test_cpu_lists() -> None:
    assert host.parse_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert host.parse_list("") == frozenset()


def test_this_machine() -> None:
    found = host.read_host()
    assert 0 < found.available_bytes <= found.total_bytes
    assert abs(found.total_bytes - os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) < MIB
    assert 1 <= found.cores <= len(os.sched_getaffinity(0))


def test_version_1_knows_limits_of_parents_that_a_container_cannot_see(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {12 * GIB}\ntotal_inactive_file {GIB}\n",
    }
    found = host.read_host(tree(tmp_path, files), frozenset({0}))
    assert (found.available_bytes, found.limited_by) == (10 * GIB, "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def test_both_versions_at_once(tmp_path: Path) -> None:
    """A hybrid host: version 2 only names processes, the limits are version 1's."""
    files = {
        "proc/self/cgroup": "4:memory:/user.slice\n0::/user.slice/session.scope\n",
        "proc/self/mountinfo": (
            "30 25 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        ),
        "sys/fs/cgroup/unified/user.slice/session.scope/cgroup.procs": "1\n",
        "sys/fs/cgroup/memory/user.slice/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/user.slice/memory.usage_in_bytes": f"{2 * GIB}\n",
    }
    found = host.read_host(tree(tmp_path, files), frozenset({0}))
    assert (found.available_bytes, found.limited_by) == (
        6 * GIB, "/sys/fs/cgroup/memory/user.slice/memory.limit_in_bytes",
    )  # fmt: skip


def test_a_system_container_whose_group_lies_outside_of_its_namespace(tmp_path: Path) -> None:
    """LXC: the path may climb out of what is mounted, and /proc/meminfo already shows the container's own memory."""
    files = {
        **v2("/../../lxc.monitor.box", mount_root="/../.."),
        "sys/fs/cgroup/memory.max": f"{16 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{4 * GIB}\n",
        "sys/fs/memory.max": "1\n",
    }
    rooms = host.memory_rooms(tree(tmp_path, files))
    assert [(r.file, r.left_bytes) for r in rooms] == [("/sys/fs/cgroup/memory.max", 12 * GIB)]


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1), ("199999 100000", 1), ("200000 100000", 2)])
def test_a_quota_between_two_cores_counts_whole_ones(tmp_path: Path, quota: str, cores: int) -> None:
    files = {**v2("/a"), **topology({i: (0, i) for i in range(4)}), "sys/fs/cgroup/a/cpu.max": f"{quota}\n"}
    assert host.read_host(tree(tmp_path, files), frozenset(range(4))).cores == cores


def test_without_sys_every_cpu_is_a_core_and_nothing_limits(tmp_path: Path) -> None:
    found = host.read_host(tree(tmp_path, {"proc/self/cgroup": "0::/\n"}), frozenset({3, 5}))
    assert (found.cores, found.numa_nodes, found.limited_by) == (2, 1, "MemAvailable")
    assert host.read_host(tmp_path, frozenset({7})).cores == 1


def test_shared_memory_without_a_file_is_given_back_and_pages_of_files_are_not(tmp_path: Path) -> None:
    """A real process with 48 MiB of anonymous shared memory, as CUDA pins it, 32 MiB of its own and 64 of a file."""
    file = tmp_path / "model"
    file.write_bytes(os.urandom(MIB) * 64)
    code = (
        "import mmap, sys\n"
        "mine = bytearray(b'x' * (32 << 20))\n"
        "pinned = mmap.mmap(-1, 48 << 20)\n"
        "pinned.write(b'y' * (48 << 20))\n"
        "f = open(sys.argv[1], 'rb'); pages = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
        "total = sum(pages[::4096]); print('ready', flush=True); sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, file], stdin=pipe, stdout=pipe) as child:
        assert child.stdin and child.stdout
        child.stdout.readline()
        found = host.own_bytes(child.pid)
        resident = psutil.Process(child.pid).memory_info().rss
        child.stdin.close()
    assert found is not None
    assert 80 * MIB <= found <= 80 * MIB + 24 * MIB  # and the interpreter
    assert resident - found >= 64 * MIB


def test_a_process_that_is_gone_gives_nothing_back(tmp_path: Path) -> None:
    assert host.own_bytes(1, root=tmp_path) is None
    assert host.own_bytes(7, root=tree(tmp_path, {"proc/7/status": "Name:\tx\n"})) is None
