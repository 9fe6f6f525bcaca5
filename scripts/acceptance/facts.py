"""What the machine is, and the environment of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from acceptance.matrix import Run
from launcher.facts import engine as engines
from launcher.facts import host, nvml
from launcher.workflows.plan import Planned


def cards() -> list[str]:
    """UUIDs of the cards in PCI order; none when the driver does not answer."""
    return [c.uuid for c in nvml.nvml_cards() if c.uuid]


def rig(uuids: list[str], engine: str | None) -> dict[str, Any]:
    """The fingerprint of every row: cards, driver, processor, memory, engine."""
    machine = host.read_host()
    found = engines.find_engine(engine, None)
    return {
        "cards": [
            {"uuid": c.uuid, "name": c.name, "total_bytes": c.total_bytes, "pci": c.pci, "link_gen": c.link_gen,
             "link_gen_max": c.link_gen_max, "link_width": c.link_width, "link_width_max": c.link_width_max,
             "numa_node": getattr(c, "numa_node", None), "note": c.note}
            for c in nvml.nvml_cards() if c.uuid in uuids
        ],
        "driver": nvml.driver_version(),
        "cpu": _cpu(),
        "cores": machine.cores,
        "total_bytes": machine.total_bytes,
        "numa_nodes": machine.numa_nodes,
        "engine": found.version,
        "engine_digest": found.digest,
    }  # fmt: skip


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")


def environment(run: Run, uuids: list[str]) -> dict[str, str]:
    """Only the run's cards, in PCI order; one of them as several where the run asks for that."""
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(uuids)}
    return env | ({"GGML_CUDA_DEVICES": str(run.virtual)} if run.virtual else {})


@contextmanager
def exported(env: Mapping[str, str]) -> Iterator[None]:
    """These variables in our own environment while the block runs."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def own_folders(work: Path) -> Iterator[None]:
    """State, caches and what is learned below the work folder: nothing of the user's is read or changed."""
    home = work / "home"
    home.mkdir(parents=True, exist_ok=True)
    with exported({"LAUNCHER_HOME": str(home)}):
        yield


def plan_facts(planned: Planned) -> dict[str, Any]:
    """The plan beside which everything is judged."""
    plan = planned.plan
    return {
        "argv": list(planned.launch.argv),
        "env": dict(planned.launch.env_set),
        "tensor_split": list(plan.tensor_split),
        "resident": {d.device.name: list(d.resident_layers) for d in plan.devices},
        "resident_bytes": sum(d.terms["experts"] for d in plan.devices),
        "devices": [
            {"name": d.device.name, "uuid": d.device.uuid, "free_bytes": d.device.free_bytes,
             "used_bytes": d.used_bytes, "headroom_bytes": d.headroom_bytes, "terms": dict(d.terms),
             "source": {k: v.value for k, v in d.source.items()}}
            for d in plan.devices
        ],
        "smallest_bundle_left_bytes": min(
            (x.bundle_bytes for x in plan.layers if x.loaded and x.bundle_bytes and not x.resident), default=None
        ),
        "expected_decode": [plan.speed.decode_tps.low, plan.speed.decode_tps.high],
        "expected_prefill": [plan.speed.prefill_tps.low, plan.speed.prefill_tps.high],
        "warnings": list(plan.warnings),
    }  # fmt: skip
