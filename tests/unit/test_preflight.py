"""Gates: each one open and closed, the sums they print, and that force opens the status gate alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import DeviceUnusable, ModelUnreadable, Refused
from launcher.serve import gates_engine, gates_machine, gates_port, preflight
from launcher.serve.gates_port import PortOwner
from launcher.serve.ports import free_port
from launcher.structs import (
    HOST_TERMS,
    EngineRef,
    Gate,
    GpuProcess,
    HostPlan,
    Plan,
    ProcessId,
    Refusal,
    RpcRef,
    RunRecord,
    ServeSettings,
    Source,
    Status,
    WayOut,
)
from launcher.units import GIB, MIB
from tests.serve_builders import B11434, card, device_plan, engine, inventory, plan, rpc_device, settings, slug

BUNDLE = 3264 * MIB
WAYS = (
    WayOut(
        change="--ctx 128k",
        fits=False,
        resident_layers=2,
        host_required_bytes=130 * GIB,
        host_available_bytes=121 * GIB,
    ),
    WayOut(
        change="--drafter off",
        fits=True,
        resident_layers=7,
        host_required_bytes=round(118.9 * GIB),
        host_available_bytes=round(121.4 * GIB),
    ),
)


def gates(p: Plan | None = None, **changes: Any) -> dict[str, Gate]:
    given: dict[str, Any] = {
        "slug": slug(),
        "target": "demo/smol-moe",
        "plan": p,
        "plan_error": None,
        "inventory": inventory(card()),
        "model_error": None,
        "engine": engine(),
        "engine_error": None,
        "port_owner": None,
        "force": False,
        "own_running": (),
        "swap_bytes": 0,
    }
    found = preflight.gates(**(given | changes))
    assert all(g.fix for g in found if not g.ok), "every refusal has a fix"
    return {g.name: g for g in found}


def closed(found: dict[str, Gate]) -> list[str]:
    return [name for name, g in found.items() if not g.ok]


def big_host(bundles: int, available: int = 124_314 * MIB) -> HostPlan:
    terms = dict.fromkeys(HOST_TERMS, 0) | {
        "experts": bundles * BUNDLE,
        "embedding": 1010 * MIB,
        "compute": 1368 * MIB,
        "checkpoints": 255 * MIB,
        "overhead": 2048 * MIB,
    }
    return HostPlan(terms=terms, source=dict.fromkeys(HOST_TERMS, Source.FORMULA), available_bytes=available, layers=())


def short_plan() -> Plan:
    refusal = Refusal(
        where="host",
        needed_bytes=138_505 * MIB,
        available_bytes=124_314 * MIB,
        largest_term="experts",
        ways_out=WAYS,
    )
    return plan(card(), target="demo/smol-moe", host=big_host(41), refusal=refusal)


def test_all_open() -> None:
    found = gates(plan(card()))
    assert closed(found) == []
    assert not [g for g in found.values() if g.note]
    assert {"model", "engine", "status", "device CUDA0", "host-ram", "port"} == found.keys()
    preflight.refuse_if_closed(found.values(), "demo/smol-moe")


def test_host_ram_prints_a_sum_that_adds_up_the_shortfall_and_a_way_out() -> None:
    gate = gates(short_plan())["host-ram-short"]
    assert gate.detail == "needs 135.3 GiB of RAM, has 121.4, short 13.9"
    assert gate.context == (
        "MiB: 133,824 experts + 1,010 embedding + 1,368 buffers + 255 checkpoints + 2,048 process = 138,505"
    )
    assert gate.fix == "launcher plan demo/smol-moe --drafter off     # 118.9 GiB of RAM, 2.5 spare"


def test_the_host_gate_moves_by_one_bundle() -> None:
    at_40 = replace(short_plan(), host=big_host(40, 135_241 * MIB), refusal=None)
    assert "host-ram" in gates(at_40)
    at_41 = replace(at_40, host=big_host(41, 135_241 * MIB))
    assert gates(at_41)["host-ram-short"].detail.endswith("short 3.2")
    exact = replace(at_40, host=big_host(41, 138_505 * MIB))
    assert gates(exact)["host-ram"].ok
    assert not gates(replace(exact, host=big_host(41, 138_505 * MIB - 1)))["host-ram-short"].ok


def test_parts_of_a_sum_are_rounded_so_that_they_add_up() -> None:
    terms = {"a": MIB // 2 + 1, "b": MIB // 2 + 1, "c": 3 * MIB + MIB // 3}
    text = preflight._sum(terms)
    parts, total = text.removeprefix("MiB: ").split(" = ")
    assert sum(int(part.split()[0]) for part in parts.split(" + ")) == int(total) == 4


def test_a_short_card_says_by_how_much_and_who_else_is_on_it() -> None:
    busy = card(processes=(GpuProcess(pid=41233, name="llama-server", used_bytes=13_214 * MIB),))
    share = device_plan(busy, {"dense": 20_000 * MIB, "experts": 3264 * MIB, "margin": 1024 * MIB})
    gate = gates(plan(share))["device-short"]
    assert gate.detail == "CUDA0 is short by 163 MiB: needs 24,288, has 24,125 free"
    assert "MiB: 20,000 dense + 3,264 experts + 1,024 margin = 24,288" in gate.context
    assert "llama-server (pid 41233, 13,214 MiB)" in gate.context


def test_missing_shards_get_the_setup_command_of_the_slug() -> None:
    error = ModelUnreadable("shards-missing", "1 of 5 shards is missing", context="m-00002-of-00005.gguf", fix="x")
    found = gates(model_error=error)
    gate = found["shards-missing"]
    assert (gate.fix, gate.context) == ("launcher setup demo/smol-moe", "m-00002-of-00005.gguf")
    assert gates(model_error=error, slug=None)["shards-missing"].fix == "x"


def test_an_engine_without_an_ability_names_it_and_its_version() -> None:
    p = plan(card(), drafter_path="/d", settings=settings(drafter_type="draft-dflash", draft_n_max=5))
    wants = slug(engine=EngineRef(needs=("spec-type:draft-dflash", "flag:--log-jsonl")))
    old = engine(flags=B11434 - {"--spec-draft-n-max"})
    gate = gates(p, slug=wants, engine=old)["engine-lacks"]
    assert "spec-type:draft-dflash, --spec-draft-n-max (0.6.0-dev" in gate.detail
    assert gate.fix.startswith("launcher engine install")


def test_no_engine_is_its_own_error_or_a_note() -> None:
    error = DeviceUnusable("engine-missing", "no llama-server", fix="launcher engine install")
    assert closed(gates(plan(card()), engine=None, engine_error=error)) == ["engine-missing"]
    assert gates(plan(card()), engine=None)["engine"].note


def test_too_few_devices() -> None:
    found = gates(plan(card()), slug=slug(devices_min=2))
    assert found["devices-too-few"].detail == "demo/smol-moe asks for 2 devices; there are 1"
    assert gates(plan(card("CUDA0"), card("CUDA1")), slug=slug(devices_min=2))["devices"].ok


@pytest.mark.parametrize("status", [Status.INCUBATING, Status.DEPRECATED])
def test_force_opens_the_status_gate_and_nothing_else(status: Status) -> None:
    labelled = slug(status=status, devices_min=3)
    busy = PortOwner(host="127.0.0.1", port=8030, pid=1, name="nginx", free_port=8031)
    error = ModelUnreadable("shards-missing", "gone", fix="x")
    without = gates(short_plan(), slug=labelled, port_owner=busy, model_error=error)
    forced = gates(short_plan(), slug=labelled, port_owner=busy, model_error=error, force=True)
    assert set(closed(without)) - set(closed(forced)) == {"status-needs-force"}
    assert set(closed(forced)) == {"shards-missing", "devices-too-few", "host-ram-short", "port-busy"}


def running() -> RunRecord:
    return RunRecord(
        slug="demo/other",
        server=ProcessId(pid=4242, create_time=1.0),
        keeper=None,
        rpc_servers=(),
        rpc_endpoints=(),
        argv=(),
        env_set={},
        host="127.0.0.1",
        port=8030,
        alias="x",
        log_path="",
        state="ready",
        started_at=1.0,
    )


def test_a_port_of_ours_is_a_note_a_foreign_one_closes_with_a_free_one() -> None:
    owner = PortOwner(host="127.0.0.1", port=8030, pid=4242, name="llama-server", free_port=8031)
    gate = gates(plan(card()), port_owner=owner)["port-busy"]
    assert (gate.detail, gate.fix) == ("port 8030 is held by llama-server (pid 4242)", "--port 8031")
    ours = running()
    note = gates(plan(card()), port_owner=owner, own_running=(ours,))["port"]
    assert (note.ok, note.note) == (True, True)
    assert "demo/other (pid 4242), which is stopped first" in note.detail


def test_port_owner_finds_the_process() -> None:
    port = free_port("127.0.0.1")
    assert gates_port.port_owner("127.0.0.1", port) is None
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        owner = gates_port.port_owner("127.0.0.1", port)
        assert owner is not None
        assert (owner.pid, owner.port) == (child.pid, port)
        assert owner.name is not None
        assert owner.name.startswith("python")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", owner.free_port))
    finally:
        child.kill()
        child.communicate()


def test_an_open_bind_without_a_key_is_a_note_that_names_the_risk() -> None:
    wide = slug(serve=ServeSettings(host="0.0.0.0"))
    note = gates(plan(card()), slug=wide)["open-to-all"]
    assert note.ok
    assert "without an API key" in note.detail
    assert "open-to-all" not in gates(plan(card()), slug=replace(wide, api_key_file="/k"))
    assert "open-to-all" not in gates(plan(card()), slug=wide, host="127.0.0.1")
    assert "open-to-all" in gates(plan(card()), slug=None, host="0.0.0.0")


def test_swap_is_a_note_where_experts_are_anonymous_memory() -> None:
    assert "8.0 GiB" in gates(plan(card()), swap_bytes=8 * GIB)["swap"].detail
    mapped = plan(card(), settings=settings(load_mode="mmap"))
    assert "swap" not in gates(mapped, swap_bytes=8 * GIB)


def test_wsl_is_a_note() -> None:
    assert gates(short_plan(), inventory=inventory(card(), wsl=True))["wsl-pinned"].note


def test_an_engine_config_for_the_whole_machine_that_moves_experts_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.ini"
    config.write_text("[*]\ncpu-moe = true\n# ot = x\nn-gpu-layers = 10\nui = false\n")
    monkeypatch.setattr(gates_engine, "SYSTEM_CONFIG", config)
    gate = gates(plan(card()))["engine-config"]
    assert "sets cpu-moe = true, n-gpu-layers = 10, which" in gate.detail
    config.write_text("ui = false\n")
    assert "engine-config" not in gates(plan(card()))


def test_a_plan_that_does_not_fit_never_passes() -> None:
    refusal = Refusal(where="CUDA0", needed_bytes=3 * GIB, available_bytes=2 * GIB, largest_term="dense")
    assert closed(gates(replace(plan(card()), refusal=refusal))) == ["does-not-fit"]


def test_a_refusal_is_the_first_closed_gate_and_lists_the_others() -> None:
    owner = PortOwner(host="127.0.0.1", port=8030, pid=None, name=None, free_port=8031)
    found = gates(short_plan(), port_owner=owner)
    with pytest.raises(Refused) as error:
        preflight.refuse_if_closed(found.values(), "demo/smol-moe")
    assert (error.value.reference, error.value.exit_code) == ("host-ram-short", 7)
    assert error.value.context.splitlines()[-1] == (
        "also closed: port-busy: port 8030 is held by a process of another user, or by a connection that is closing"
    )
    assert error.value.fix == found["host-ram-short"].fix


def test_a_plan_error_keeps_its_id() -> None:
    error = DeviceUnusable("driver-broken", "no driver", fix="reboot")
    assert closed(gates(plan_error=error)) == ["driver-broken"]


def test_looking_at_ports_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(5):
        gates_port.port_owner("127.0.0.1", free_port("127.0.0.1"))
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize(
    ("host", "port", "why", "fix"),
    [
        ("192.0.2.1", 8030, "Cannot assign", "--host 127.0.0.1 --port 8030"),
        ("no-such-host.invalid", 8030, "", "--host 127.0.0.1 --port 8030"),
        ("127.0.0.1", 70000, "65535", "--host 127.0.0.1 --port 8080"),
    ],
)
def test_an_address_that_is_not_ours_is_no_process_of_another_user(host: str, port: int, why: str, fix: str) -> None:
    gate = gates(plan(card()), port_owner=gates_port.port_owner(host, port))["address-unusable"]
    assert why in gate.detail
    assert f"{host}:{port}" in gate.detail
    assert "another user" not in gate.detail
    assert gate.fix == fix


def test_a_state_folder_that_takes_no_record_closes(launcher_home: Path) -> None:
    (launcher_home / "state").write_text("in the way")
    gate = gates(plan(card()))["state-unwritable"]
    assert "cannot be written" in gate.detail


def test_a_taken_port_of_an_rpc_server_closes_unless_it_is_of_a_server_that_leaves() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ref = RpcRef(hosts=(f"127.0.0.1:{port}",), spawn=True)
        spawns = slug(rpc=ref)
        p = plan(rpc_device(0, port))
        gate = gates(p, slug=spawns)["rpc-port-busy"]
        assert f"127.0.0.1:{port}" in gate.detail
        assert f"(pid {os.getpid()})" in gate.detail
        assert "rpc-port-busy" not in gates(p, slug=replace(spawns, rpc=replace(ref, spawn=False)))
        leaving = replace(running(), rpc_endpoints=(f"127.0.0.1:{port}",))
        assert "rpc-port-busy" not in gates(p, slug=spawns, own_running=(leaving,))
    free = free_port("127.0.0.1", 21000)  # below the ports that the system hands out
    spawns = slug(rpc=RpcRef(hosts=(f"127.0.0.1:{free}",), spawn=True))
    assert "rpc-port-busy" not in gates(plan(rpc_device(0, free)), slug=spawns)


def test_a_connection_that_uses_the_port_as_its_own_end_is_named_too() -> None:
    """The system hands out such ports; nobody listens there and a bind fails all the same."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        owner = gates_port.port_owner("127.0.0.1", client.getsockname()[1])
        assert owner is not None
        assert owner.pid == os.getpid()


@pytest.mark.parametrize(
    ("file", "fix", "never"),
    [
        ("/proc/self/status Mems_allowed_list", "cat /sys/devices/system/node/has_memory ", "--memory"),
        (
            "/sys/fs/cgroup/user.slice/user-1000.slice/memory.high",
            "sudo systemctl set-property --runtime user-1",
            "dock",
        ),
        ("/sys/fs/cgroup/memory.max", "docker update --memory 0 ", "systemctl"),
        ("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "docker update --memory 0 ", "systemctl"),
        ("/sys/fs/cgroup/kubepods/pod1/memory.max", "cat /sys/fs/cgroup/kubepods/pod1/memory.max ", "docker"),
        ("/sys/fs/cgroup/memory/slurm/uid_0/job_1/memory.limit_in_bytes", "cat /sys/fs/cgroup/memory/slurm/", "docker"),
    ],
)
def test_a_memory_limit_is_widened_by_whoever_set_it(file: str, fix: str, never: str) -> None:
    (gate,) = gates_machine._memory_limit(inventory(limited_by=file))
    assert gate.fix.startswith(fix)
    assert never not in gate.fix
