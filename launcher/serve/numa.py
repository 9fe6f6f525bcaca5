"""The memory policy of a launch: numactl's words in front of the engine's command line, read back, and its gate.

A prefix and not a call of ours before exec, so that what `plan` shows is the whole truth and can be pasted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from launcher.planner.numa import ENGINE_MODES
from launcher.structs import Gate, HostPlan, NumaPlan, Plan
from launcher.units import gib

__all__ = ["ENGINE_MODES", "gates", "on_nodes", "policy_nodes", "prefix", "split_policy"]


def prefix(plan: Plan) -> tuple[str, ...]:
    """numactl in front of the engine: only a policy of the process says where memory lies, --numa places threads."""
    nodes = plan.host.numa
    return (nodes.numactl or "numactl", *nodes.policy) if nodes is not None and nodes.policy else ()


def split_policy(argv: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(numactl and its words, empty without; the engine's own command line)."""
    if not argv or PurePath(argv[0]).name != "numactl":
        return (), argv
    end = next((i for i, word in enumerate(argv) if i and not word.startswith("-")), len(argv))
    return argv[:end], argv[end:]


def policy_nodes(argv: tuple[str, ...]) -> tuple[int, ...]:
    """The nodes that hold the memory of a command line of ours; empty where no policy names any."""
    words, _ = split_policy(argv)
    listed = next((w.partition("=")[2] for w in words if w.startswith(("--membind=", "--interleave="))), "")
    return tuple(int(n) for n in listed.split(",") if n.isdigit())


def on_nodes(host: HostPlan) -> str:
    """` (bind:0; 240.0 with interleave:0,1)`: the memory that a policy reaches, and where there is more."""
    if host.numa is None or not host.numa.where:
        return ""
    most = max((o.available_bytes for o in host.numa.alternatives), default=0)
    more = f"; {gib(most)} with {_widest(host.numa)}" if most > host.available_bytes else ""
    return f" ({host.numa.where}{more})"


def _widest(nodes: NumaPlan) -> str:
    return max(nodes.alternatives, key=lambda o: o.available_bytes).label


def gates(plan: Plan) -> Iterator[Gate]:
    """Which NUMA nodes hold host memory, why, and what else could; nothing on a machine with one node."""
    nodes = plan.host.numa
    if nodes is None:
        return
    if nodes.policy and nodes.numactl is None:
        yield Gate(
            name="numactl-missing",
            ok=False,
            detail=f"--numa {nodes.chosen.label} needs numactl, which is not installed or may not set a memory policy "
            "here (a container needs --cap-add SYS_NICE)",
            fix="sudo apt-get install numactl     # or without a policy: --numa distribute",
        )
        return
    fix = ""
    if plan.settings.numa == "auto" and nodes.numactl is None and not nodes.policy and nodes.chosen.mode != "off":
        then = next((o.label for o in nodes.alternatives if o.fits), "interleave")
        fix = f"sudo apt-get install numactl     # in a container --cap-add SYS_NICE; then by policy: {then}"
    elif nodes.policy and plan.settings.load_mode.startswith("mmap"):
        # Pages that are cached already stay where they are, and the engine reads them from there.
        fix = "sync; echo 1 | sudo tee /proc/sys/vm/drop_caches     # once, so that cached pages move too"
    yield Gate(name="numa", ok=True, note=bool(fix), detail=nodes.summary, fix=fix)
