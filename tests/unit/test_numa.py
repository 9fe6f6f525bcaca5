"""The choice of NUMA nodes, and that gate, command line and documents say the same."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from launcher.errors import UsageError
from launcher.planner import make_plan, numa
from launcher.planner.numa import Demand
from launcher.render import document
from launcher.render import plan as screen
from launcher.serve import argv, preflight
from launcher.serve import numa as policy
from launcher.structs import Device, Host, Inventory, Launch, NumaNode, NumaPlan, Plan, Settings
from launcher.units import GIB
from launcher.workflows import world
from launcher.workflows.ways_out import _changes
from tests import models
from tests.serve_builders import engine

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "plan.schema.json").read_text(encoding="utf-8"))


def node(index: int, free: int = 100, cores: int = 16, socket: int | None = None, bps: float | None = None) -> NumaNode:
    return NumaNode(
        index=index,
        total_bytes=128 * GIB,
        available_bytes=free * GIB,
        cores=cores,
        socket=index if socket is None else socket,
        bps=bps,
    )


def machine(*nodes: NumaNode, **changes: Any) -> Host:
    total = sum(n.available_bytes for n in nodes)
    found = Host(
        total_bytes=1024 * GIB,
        available_bytes=total,
        limited_by="MemAvailable",
        cores=max(1, sum(n.cores for n in nodes)),
        numa_nodes=len(nodes),
        nodes=nodes,
        numactl="/usr/bin/numactl",
    )
    return replace(found, **changes)


TWO = machine(node(0), node(1))
NPS4 = machine(*(node(i, socket=0, cores=4) for i in range(4)))
EIGHT = machine(*(node(i, socket=i // 4, cores=4) for i in range(8)))


def choose(host: Host, gib: int, wanted: str = "auto", *, first: int | None = None, **changes: Any) -> NumaPlan:
    demand = Demand(required_bytes=gib * GIB, first=("CUDA0", first), **changes)
    found = numa.choose(host, demand, wanted)
    assert found is not None
    return found


def test_one_node_is_no_choice() -> None:
    one = machine(node(0))
    assert numa.choose(one, Demand(required_bytes=GIB)) is None
    assert numa.bandwidth_bps(replace(one, triad_bps=50e9), None) == 50e9


@pytest.mark.parametrize(
    ("host", "gib", "first", "expected"),
    [
        (TWO, 90, 1, "bind:1"),  # the card's node holds the sum
        (TWO, 90, None, "bind:0"),
        (machine(node(0), node(1, free=80)), 90, 1, "bind:0"),  # the card's does not, the other does
        (machine(node(0, free=80), node(1)), 70, None, "bind:1"),  # nothing known of the card: where more is left
        (TWO, 100, 0, "bind:0"),  # to the byte
        (TWO, 101, 0, "interleave:0,1"),
        (TWO, 500, 0, "interleave:0,1"),  # fits nowhere: the most there is, which the gate then refuses
        (machine(node(0), node(2)), 90, 2, "bind:2"),  # a gap in the numbers
        (NPS4, 20, 1, "interleave:0,1,2,3"),  # one cluster has a quarter of the channels
        (EIGHT, 20, 5, "interleave:4,5,6,7"),  # the socket of the card
        (EIGHT, 500, 5, "interleave:0,1,2,3,4,5,6,7"),
        (machine(node(0), node(1, cores=0)), 90, 1, "bind:0"),  # memory without cores is no place to compute
        (machine(node(0), node(1, cores=0)), 150, 0, "interleave:0,1"),
        (machine(node(0), node(1), node(2, cores=0)), 150, 0, "interleave:0,1"),
        (machine(node(0), node(1), node(2, cores=0)), 250, 0, "interleave:0,1,2"),
    ],
)
def test_choice_by_memory(host: Host, gib: int, first: int | None, expected: str) -> None:
    assert choose(host, gib, first=first).chosen.label == expected


def test_a_control_group_caps_every_node() -> None:
    assert not choose(replace(TWO, available_bytes=50 * GIB), 60).chosen.fits
    assert choose(TWO, 90, taken_bytes=11 * GIB).chosen.label == "interleave:0,1"


def test_the_largest_measured_bandwidth_of_what_fits_wins() -> None:
    measured = machine(node(0, bps=150e9), node(1, bps=140e9), interleave_bps=210e9)
    assert choose(measured, 90, first=1).chosen.label == "interleave:0,1"
    tie = replace(measured, interleave_bps=150e9)
    assert choose(tie, 90, first=1).chosen.label == "bind:0"
    assert choose(tie, 101).chosen.label == "interleave:0,1"  # the bind is as fast and does not fit
    assert choose(replace(measured, distribute_bps=300e9), 90).chosen.label == "distribute"
    cluster = machine(*(node(i, socket=0, bps=80e9) for i in range(4)), interleave_bps=70e9)
    assert choose(cluster, 20).chosen.label == "bind:0"
    # Clusters of a socket are interleaved unless told otherwise: here the tie goes to the bind all the same.
    assert choose(replace(cluster, interleave_bps=80e9), 20).chosen.label == "bind:0"


def test_nothing_read_from_host_memory_needs_no_policy() -> None:
    found = choose(TWO, 2, reads_weights=False)
    assert (found.chosen.label, found.policy, found.engine_mode) == ("off", (), None)


def test_threads_go_where_the_memory_is() -> None:
    bound = choose(TWO, 90, first=1)
    assert (bound.policy, bound.threads) == (("--cpunodebind=1", "--membind=1"), 16)
    spread = choose(TWO, 150)
    assert (spread.policy, spread.threads) == (("--interleave=0,1",), 32)
    socket = choose(EIGHT, 20, first=5)
    assert (socket.policy, socket.threads) == (("--cpunodebind=4,5,6,7", "--interleave=4,5,6,7"), 16)
    few = choose(TWO, 90, threads=8)
    assert (few.policy, few.threads) == (("--cpunodebind=0", "--membind=0"), 8)
    many = choose(TWO, 90, threads=24)
    assert (many.policy, many.threads) == (("--membind=0",), 24)
    assert "24 threads are more than its 16 cores" in many.why
    assert choose(replace(TWO, cores=6), 90).threads == 6  # a quota of the control group


def test_a_mode_that_was_named_is_kept() -> None:
    assert choose(TWO, 120, "bind:1").chosen.fits is False
    assert choose(TWO, 120, "bind", first=1).chosen.label == "bind:1"
    assert choose(TWO, 20, "interleave").chosen.label == "interleave:0,1"
    assert choose(EIGHT, 20, "interleave:0-3").chosen.label == "interleave:0,1,2,3"
    for mode in ("distribute", "isolate", "numactl"):
        found = choose(TWO, 20, mode)
        assert (found.engine_mode, found.policy, found.chosen.available_bytes) == (mode, (), 200 * GIB)
    assert choose(TWO, 20, "off").engine_mode is None


def test_nodes_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="names node 3; nodes .*: 0, 1") as caught:
        choose(TWO, 20, "bind:3")
    assert (caught.value.reference, caught.value.fix) == ("numa-node-unknown", "--numa bind:0")
    with pytest.raises(UsageError, match="only their count, 2") as caught:
        choose(machine(numa_nodes=2, available_bytes=9 * GIB), 2, "bind:0")
    assert caught.value.reference == "numa-nodes-unknown"


def test_a_count_alone_is_interleaved_over_all() -> None:
    found = choose(machine(numa_nodes=2, available_bytes=90 * GIB, triad_bps=60e9), 20)
    assert (found.policy, found.chosen.available_bytes) == (("--interleave=all",), 90 * GIB)
    assert numa.bandwidth_bps(machine(numa_nodes=2, triad_bps=60e9), found) == 60e9


def test_without_numactl_the_engine_distributes_its_threads() -> None:
    found = choose(replace(TWO, numactl=None), 90)
    assert (found.chosen.label, found.policy, found.engine_mode) == ("distribute", (), "distribute")
    assert "numactl is not installed" in found.why
    assert [o.label for o in found.alternatives] == ["bind:0", "bind:1", "interleave:0,1"]


def test_bandwidth_of_the_choice() -> None:
    host = machine(node(0, bps=150e9), node(1), triad_bps=300e9)
    assert numa.bandwidth_bps(host, choose(host, 90, "bind:0")) == 150e9
    assert numa.bandwidth_bps(host, choose(host, 90, "bind:1")) is None  # never the machine's for a part of it
    assert numa.bandwidth_bps(host, choose(host, 150)) == 300e9
    assert (
        numa.bandwidth_bps(replace(host, interleave_bps=210e9), choose(replace(host, interleave_bps=210e9), 150))
        == 210e9
    )


# ------------------------------------------------------------------------------------------ in a plan

HEADER = models.moe_header([2048] * 8)  # 16 GiB of experts


def planned(host: Host, wanted: str = "auto", *, card_node: int | None = 1, **changes: Any) -> Plan:
    cards: tuple[Device, ...] = (replace(models.card(0, 4000), numa_node=card_node),)
    return make_plan(
        target="/models/m.gguf",
        header=HEADER,
        drafter=None,
        inventory=Inventory(devices=cards, host=host),
        settings=Settings(n_ctx_per_stream=4096, numa=wanted, **changes),
    )


def launch(p: Plan) -> Launch:
    return argv.build(
        p, engine=engine(), host="127.0.0.1", port=8030, alias="m", slug=None, base_env={}, empty_config="/empty"
    )


SMALL = machine(node(0, free=30), node(1, free=30), triad_bps=100e9)
TIGHT = machine(node(0, free=12), node(1, free=12), triad_bps=100e9)


def gate(p: Plan) -> dict[str, Any]:
    return {g.name: g for g in (*preflight.fit(p), *policy.gates(p))}


def test_the_host_gate_counts_the_memory_of_the_choice() -> None:
    p = planned(SMALL)
    assert (p.host.available_bytes, p.settings.threads) == (30 * GIB, 16)
    assert p.host.required_bytes <= 30 * GIB  # prompt cache and checkpoints out of the node's spare too
    assert "of 30.0 GiB (bind:1; 60.0 with" in gate(p)["host-ram"].detail
    assert planned(TIGHT).host.available_bytes == 24 * GIB
    one = planned(machine(node(0, free=60)))
    assert (one.host.numa, one.settings.threads) == (None, 16)
    assert list(gate(one)) == ["device CUDA0", "host-ram"]


def test_a_bind_that_does_not_fit_is_refused_with_the_sum_and_the_way_out() -> None:
    p = planned(TIGHT, "bind:0")
    assert p.refusal is not None
    assert (p.refusal.where, p.refusal.available_bytes) == ("host", 12 * GIB)
    closed = gate(p)["host-ram-short"]
    assert "has 12.0 (bind:0; 24.0 with interleave:0,1), short" in closed.detail
    change = next(iter(_changes(Settings(numa="bind:0"), p)))
    assert change.text == "--numa interleave"
    assert planned(TIGHT, change.settings.numa).fits


def test_the_gate_says_what_was_chosen_why_and_what_else() -> None:
    measured = machine(node(0, free=30, bps=60e9), node(1, free=30), interleave_bps=50e9)
    found = gate(planned(measured))["numa"]
    assert (found.ok, found.note) == (True, False)
    assert found.detail.startswith("bind:0 (60 GB/s): the host sum of ")
    assert "else bind:1 (GB/s unknown, 30.0 GiB), interleave:0,1 (50 GB/s, 60.0 GiB), distribute" in found.detail


def test_a_policy_without_numactl_is_a_closed_gate_when_asked_for_and_a_note_else() -> None:
    bare = replace(SMALL, numactl=None)
    closed = gate(planned(bare, "interleave"))["numactl-missing"]
    assert not closed.ok
    assert closed.fix.startswith("sudo apt-get install numactl")
    note = gate(planned(bare))["numa"]
    assert note.note
    assert note.fix.endswith("then by policy: bind:1")


def test_cached_pages_of_a_mapped_file_stay_where_they_are() -> None:
    assert "drop_caches" in gate(planned(SMALL, load_mode="mmap"))["numa"].fix
    assert gate(planned(SMALL))["numa"].fix == ""


def test_the_command_line_is_the_whole_policy_and_parses_back() -> None:
    words = launch(planned(SMALL)).argv
    assert words[:4] == ("/usr/bin/numactl", "--cpunodebind=1", "--membind=1", "/opt/llama-server")
    said = argv.parse_back(words)
    assert (said["engine"], said["numa"], said["threads"]) == ("/opt/llama-server", "numactl", 16)
    assert said["numa_policy"] == ("--cpunodebind=1", "--membind=1")
    assert "extra" not in said
    assert argv.planned_split(words)[0] == ("CUDA0",)
    assert policy.policy_nodes(words) == (1,)
    assert screen.command(launch(planned(SMALL))).endswith(shlex.join(words))
    dry = argv.dry_run_argv(launch(planned(SMALL)), 9)
    assert dry[0] == "/opt/llama-server"  # it allocates nothing


def test_one_node_and_the_engines_own_modes_write_no_policy() -> None:
    one = launch(planned(machine(node(0, free=60)), "interleave")).argv
    assert one[0] == "/opt/llama-server"
    assert "--numa" not in one
    two = launch(planned(SMALL, "isolate")).argv
    assert (two[0], two[two.index("--numa") + 1]) == ("/opt/llama-server", "isolate")
    assert policy.policy_nodes(two) == ()


def test_the_speed_is_that_of_the_choice() -> None:
    free = planned(SMALL, "interleave").speed.decode_tps
    bound = planned(replace(SMALL, nodes=(node(0, free=30), node(1, free=30, bps=50e9))), "bind:1").speed.decode_tps
    assert free.low is not None
    assert bound.low is not None
    assert bound.low < free.low
    assert planned(SMALL, "bind:1").speed.limited_by == "host bandwidth is not measured"


def test_documents_say_it_on_machines_with_more_than_one_node_only() -> None:
    p = planned(SMALL)
    whole = json.loads(json.dumps(document.plan_document(p, launch(p))))
    jsonschema.Draft202012Validator(SCHEMA).validate(whole)
    doc = whole["host"]["numa"]
    assert (doc["chosen"]["numa"], doc["chosen"]["nodes"], doc["policy"][-1]) == ("bind:1", [1], "--membind=1")
    assert [o["numa"] for o in doc["alternatives"]] == ["bind:0", "interleave:0,1", "distribute"]
    assert doc["nodes"][1]["available_bytes"] == 30 * GIB
    assert doc["device_nodes"] == {"CUDA0": 1}
    text = "\n".join(str(line) for line in screen.screen(p, launch(p), Inventory(devices=(), host=SMALL)))
    assert "NUMA       bind:1 (GB/s unknown): the host sum" in text
    one = planned(machine(node(0, free=60)))
    assert "numa" not in document.plan_document(one)["host"]


def test_a_server_that_will_be_gone_gives_its_nodes_their_memory_back() -> None:
    bound = ("numactl", "--cpunodebind=1", "--membind=1", "llama-server", "-m", "x")
    after = world.without(SMALL, [(20 * GIB, bound)])
    assert [n.available_bytes // GIB for n in after.nodes] == [30, 50]
    assert after.available_bytes == 80 * GIB
    spread = world.without(SMALL, [(20 * GIB, ("numactl", "--interleave=0,1", "llama-server"))])
    assert [n.available_bytes // GIB for n in spread.nodes] == [40, 40]
    full = replace(SMALL, nodes=(node(0, free=128), node(1, free=28)))
    assert [n.available_bytes // GIB for n in world.without(full, [(20 * GIB, ("llama-server",))]).nodes] == [128, 48]
