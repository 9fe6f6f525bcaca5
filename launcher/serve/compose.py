"""A container -> the words of `docker run` or `podman run`, or the override of compose.yaml; and back. Pure.

The override holds all that differs from launch to launch, its `command` a list that no shell reads. compose puts
variables into every string: each `$` is doubled, and rules of tensors end in one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.structs import Container, Mount

SERVICE = "llama-server"
LABEL = "llama-launcher"
_CDI = "nvidia.com/gpu="


def override(box: Container) -> dict[str, Any]:
    """The document to lay over compose.yaml. A value of `passed` is null: taken from the client's environment."""
    service: dict[str, Any] = {
        "image": box.image.name,
        "container_name": box.name,
        "labels": {LABEL: box.name},
        "command": list(box.command),
        "environment": {**box.environment, **dict.fromkeys(box.passed)},
        "volumes": [
            {"type": "bind", "source": m.source, "target": m.target, "read_only": True,
             "bind": {"create_host_path": False}}
            for m in box.mounts
        ],
        "ulimits": {name: {"soft": soft, "hard": hard} for name, (soft, hard) in _limits(box).items()},
    }  # fmt: skip
    if box.entrypoint:
        service["entrypoint"] = list(box.entrypoint)
    if box.memory_bytes is not None:
        service["mem_limit"] = f"{box.memory_bytes}b"
    if box.cards and box.runtime.kind == "podman":
        service["devices"] = [_CDI + uuid for uuid in box.cards]
    elif box.cards:
        ask = {"driver": "nvidia", "device_ids": list(box.cards), "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [ask]}}}
    document: dict[str, Any] = _each({"services": {SERVICE: service}}, lambda text: text.replace("$", "$$"))
    return document


def parse_override(document: Mapping[str, Any]) -> dict[str, Any]:
    """What an override says, by the fields of Container that it can say, to be compared with the plan's."""
    service = _each(document["services"][SERVICE], lambda text: text.replace("$$", "$"))
    limits = {n: (v["soft"], v["hard"]) for n, v in service.get("ulimits", {}).items()}
    memlock = limits.pop("memlock", (-1, -1))[0]
    asked = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    cards = [uuid for device in asked for uuid in device["device_ids"]]
    cards += [text.removeprefix(_CDI) for text in service.get("devices", [])]
    memory = service.get("mem_limit")
    return {
        "image": service["image"],
        "name": service["container_name"],
        "entrypoint": tuple(service.get("entrypoint", ())),
        "command": tuple(service["command"]),
        "mounts": tuple(Mount(source=v["source"], target=v["target"]) for v in service["volumes"] if v["read_only"]),
        "environment": {k: v for k, v in service["environment"].items() if v is not None},
        "passed": tuple(k for k, v in service["environment"].items() if v is None),
        "cards": tuple(cards),
        "memory_bytes": None if memory is None else int(memory.removesuffix("b")),
        "memlock_bytes": None if memlock == -1 else memlock,
        "ulimits": limits,
    }


def run_words(box: Container, *, detach: bool) -> tuple[str, ...]:
    """What stands behind the client's name to start the container without compose.

    detach  in the background, kept after its end so that it can be asked how it ended; else in the foreground and
            removed by the client
    """
    words = ["run", "--name", box.name, "--label", f"{LABEL}={box.name}", "--pull", "never", "--network", "host"]
    words += ["--detach"] if detach else ["--rm"]
    if box.runtime.kind == "podman":
        # A journal is not everywhere; and on SELinux the files would have to be relabelled, terabytes of them.
        words += ["--log-driver", "k8s-file", "--security-opt", "label=disable"]
    for name, (soft, hard) in _limits(box).items():
        words += ["--ulimit", f"{name}={soft}:{hard}"]
    if box.memory_bytes is not None:
        words += ["--memory", f"{box.memory_bytes}b"]
    for m in box.mounts:
        words += ["--mount", f"type=bind,{_field('source', m.source)},{_field('target', m.target)},readonly"]
    for name, value in box.environment.items():
        words += ["--env", f"{name}={value}"]
    for name in box.passed:
        words += ["--env", name]
    if box.cards and box.runtime.kind == "podman":
        for uuid in box.cards:
            words += ["--device", _CDI + uuid]
    elif box.cards:
        words += ["--gpus", '"device=' + ",".join(box.cards) + '"']  # a field of CSV: the quotes belong to it
    if box.entrypoint:
        # Its first word only: docker takes no list here.
        words += ["--entrypoint", box.entrypoint[0]]
    return (*words, box.image.name, *box.entrypoint[1:], *box.command)


def _limits(box: Container) -> dict[str, tuple[int, int]]:
    memlock = -1 if box.memlock_bytes is None else box.memlock_bytes
    return {"memlock": (memlock, memlock), **box.ulimits}


def _field(name: str, value: str) -> str:
    """One field of --mount, which is read as CSV."""
    text = f"{name}={value}"
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n') else text


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each(item, change) for item in value]
    if isinstance(value, dict):
        return {k: _each(v, change) for k, v in value.items()}
    return value
