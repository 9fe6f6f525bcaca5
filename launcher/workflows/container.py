"""Which container runtime and image a target is served with, and the engine in it; None without a container.

`--container` or `--image` asks for one; a slug's image alone does not, since most people have a llama-server of their
own. `--image` is enough: the runtime is then the one that is here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.facts import container as facts
from launcher.facts import gguf_header
from launcher.facts.paths import state_dir
from launcher.serve import container
from launcher.structs import Container, Engine, Image, Launch, Runtime, Slug
from launcher.workflows import overrides

_KINDS = ("docker", "podman", "compose", "auto", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What a target is served in."""

    runtime: Runtime
    image: Image
    engine: Engine


def wanted(slug: Slug | None, given: Mapping[str, Any], explicit: str | None) -> tuple[str, str] | None:
    """(runtime, image) that are asked for, None for a process of this machine. Raises UsageError."""
    kind, image = given.get("container"), given.get("image") or (slug.engine.image if slug else None)
    if kind is not None and kind not in _KINDS:
        fix = overrides.nearest("--container", str(kind), _KINDS)
        raise overrides.invalid("--container", f"{kind!r} is none of {', '.join(_KINDS)}", fix)
    if explicit is not None and (kind not in (None, "off") or given.get("image")):
        raise overrides.invalid("--engine", "the engine of a container is the one in its image", "--container off")
    if kind == "off" or explicit is not None or (kind is None and not given.get("image")):
        return None
    if image is None:
        fix = f"--container {kind} --image ghcr.io/ggml-org/llama.cpp:server-cuda     # or engine.image in the slug"
        raise overrides.invalid("--container", "no image: neither --image nor engine.image of a slug names one", fix)
    return kind or "auto", str(image)


def find(slug: Slug | None, given: Mapping[str, Any], explicit: str | None) -> Box | None:
    """The box of a target, None for a process of this machine.

    Raises UsageError (override-invalid), DeviceUnusable (container-missing, image-missing, image-no-engine).
    """
    asked = wanted(slug, given, explicit)
    if asked is None:
        return None
    kind, name = asked
    if slug is not None and slug.rpc is not None and slug.rpc.spawn:
        problem = f"{slug.name} starts RPC servers of this machine's engine, an image has its own"
        raise overrides.invalid("--container", problem, "--container off")
    runtime = facts.find_runtime(kind, os.environ)
    image = facts.read_image(runtime, name, os.environ)
    engine = facts.probe(runtime, image, os.environ, path=slug.engine.path if slug else None)
    return Box(runtime=runtime, image=image, engine=engine)


def files_of(launch: Launch, projector: str | None) -> tuple[str, ...]:
    """Every file that the engine opens as a model: shards, drafter's shards, projector."""
    named = [p for p in (launch.plan.model.path, launch.plan.drafter_path, projector) if p]
    return tuple(dict.fromkeys(os.path.abspath(p) for path in named for p in gguf_header.find_shards(path)))  # noqa: PTH100


def contained(launch: Launch, box: Box, projector: str | None) -> Container:
    """The container of a launch."""
    return container.contained(
        launch, box.runtime, box.image, files=files_of(launch, projector), home=str(state_dir()),
        limits=facts.own_limits(),
    )  # fmt: skip
