"""Docker or podman: which is there, what it may do, an image that lies here, and what the engine in it can do.

Everything is asked of the client itself; nothing is fetched. What an engine's --help said is kept by the digest of
its image.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.errors import DeviceUnusable
from launcher.facts import engine as engine_facts
from launcher.facts.engine_help import parse_help, parse_removed, parse_version
from launcher.facts.surroundings import memlock_limits
from launcher.structs import Engine, Image, Runtime

KINDS = ("docker", "podman", "compose")
_CAP_SYS_RESOURCE = 24  # linux/capability.h: raising hard limits
_CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_CDI_NAME = re.compile(r"""["']?name["']?:\s*["']?(GPU-[0-9a-fA-F-]+)["']?""")
_SCHEMA = 1
_MOST = 16384


def find_runtime(asked: str, env: Mapping[str, str]) -> Runtime:
    """The program that runs containers.

    asked  `docker`, `podman`, `compose` (what implements it, with the runtime under it) or `auto`: docker where its
           daemon answers, else podman

    Raises DeviceUnusable (container-missing) where it is not there or does not answer, with its own words.
    """
    if asked == "compose":
        return _compose(env)
    said: list[str] = []
    for kind in ("docker", "podman") if asked == "auto" else (asked,):
        path = shutil.which(kind)
        if path is None:
            said.append(f"{kind}: not in PATH")
            continue
        called = engine_facts.call((path, "info", "--format", "{{json .}}"), env)
        try:
            found = dict(json.loads(called.out)) if called.code == 0 else {}
        except ValueError:
            found = {}
        if found and not found.get("ServerErrors"):
            return _docker(path, found) if kind == "docker" else parse_podman(path, found)
        errors = "; ".join(str(e) for e in found.get("ServerErrors") or ())
        said.append(f"{kind}: {errors or called.cause() or called.note or f'exit code {called.code}'}")
    word = "docker or podman" if asked == "auto" else asked
    install = "docker.io" if asked == "docker" else "podman"
    raise DeviceUnusable(
        "container-missing",
        f"{word} does not run containers here",
        context="\n".join(said),
        fix=f"sudo apt-get install {install}     # or without a container: leave --image out",
    )


def _compose(env: Mapping[str, str]) -> Runtime:
    """`docker compose`, else podman-compose."""
    docker, podman = shutil.which("docker"), shutil.which("podman-compose")
    if docker and engine_facts.call((docker, "compose", "version"), env).code == 0:
        return replace(find_runtime("docker", env), compose=(docker, "compose"))
    if podman:
        return replace(find_runtime("podman", env), compose=(podman,))
    raise DeviceUnusable(
        "container-missing",
        "no compose implementation found: neither `docker compose` nor podman-compose",
        context=f"docker: {docker or 'not in PATH'}; podman-compose: not in PATH",
        fix="pip install podman-compose     # or --container podman: no compose is needed then",
    )


def _docker(path: str, info: Mapping[str, Any]) -> Runtime:
    rootless = any("rootless" in str(option) for option in info.get("SecurityOptions") or ())
    runtimes = info.get("Runtimes")
    limits = info.get("MemoryLimit")
    return Runtime(
        kind="docker",
        path=path,
        version=str(info.get("ServerVersion") or "unknown"),
        rootless=rootless,
        limits_memory=limits if isinstance(limits, bool) else None,
        # its daemon is started by root, without limit; a rootless one has what its user has
        most_memlock_bytes=memlock_limits()[1] if rootless else None,
        raises_limits=not rootless,
        nvidia="nvidia" in runtimes if isinstance(runtimes, dict) else None,
    )


def parse_podman(path: str, info: Mapping[str, Any]) -> Runtime:
    """A Runtime of what `podman info` says; limits are this process's, since podman has no daemon."""
    host = info.get("host") or {}
    controllers = host.get("cgroupControllers")
    rootless = bool((host.get("security") or {}).get("rootless"))
    raises = _capable(_CAP_SYS_RESOURCE) and not rootless
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]  # CAP_IPC_LOCK of ours does not arrive in a container
    return Runtime(
        kind="podman",
        path=path,
        version=str((info.get("version") or {}).get("Version") or "unknown"),
        rootless=rootless,
        limits_memory="memory" in controllers if controllers is not None else None,
        most_memlock_bytes=None if raises or hard == resource.RLIM_INFINITY else hard,
        raises_limits=raises,
        cdi=cdi_devices(_CDI_FOLDERS),
    )


def cdi_devices(folders: tuple[Path, ...]) -> frozenset[str]:
    """Cards that CDI files name by UUID, as podman is asked for them; empty where there are none."""
    found = set()
    for folder in folders:
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            if "nvidia.com/gpu" in text:
                found |= {f"nvidia.com/gpu={uuid}" for uuid in _CDI_NAME.findall(text)}
    return frozenset(found)


def own_limits() -> dict[str, tuple[int, int]]:
    """(soft, hard) of `nofile` and `nproc` that a runtime without CAP_SYS_RESOURCE can hand on.

    Those of this process, 16,384 at most: podman 4.3 lowers its own nproc by an amount that it does not tell (of 96,365
    it could hand on 32,000 and not 62,835), and a server needs some hundred of each.
    """
    kinds = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    found = {name: resource.getrlimit(kind) for name, kind in kinds.items()}
    return {name: (_within(soft), _within(hard)) for name, (soft, hard) in found.items()}


def _within(limit: int) -> int:
    return _MOST if limit == resource.RLIM_INFINITY else min(limit, _MOST)


def read_image(runtime: Runtime, name: str, env: Mapping[str, str]) -> Image:
    """An image of this machine. Raises DeviceUnusable (image-missing): nothing is fetched by a start."""
    called = engine_facts.call((runtime.path, "image", "inspect", name), env)
    try:
        found = json.loads(called.out)[0] if called.code == 0 else None
        if found is not None:
            entry = (found.get("Config") or {}).get("Entrypoint") or ()
            return Image(name=name, digest=str(found["Id"]).removeprefix("sha256:"), entrypoint=tuple(entry))
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    raise DeviceUnusable(
        "image-missing",
        f"{runtime.kind} has no image {name}",
        context=called.cause() or called.note,
        fix=f"{runtime.kind} pull {name}",
    )


def probe(runtime: Runtime, image: Image, env: Mapping[str, str], *, path: str | None = None) -> Engine:
    """What the llama-server of an image can do, by its own --help in a container that is removed again.

    path  of the binary inside, for an image whose entrypoint is another
    Raises DeviceUnusable (image-no-engine).
    """
    binary = path or (image.entrypoint[0] if image.entrypoint else engine_facts.NAME)
    kept = engine_facts.cache_file(f"image-{image.digest}.json")
    known = engine_facts.load_known(kept)
    if known.get("schema") != _SCHEMA or known.get("binary") != binary:
        known = _ask(runtime, image, binary, env, own=path is None and bool(image.entrypoint))
        engine_facts.store_known(kept, known)
    return Engine(
        path=binary,
        version=str(known["version"]),
        digest=image.digest,
        found_by=f"image {image.name}",
        flags=frozenset(known["flags"]),
        spec_types=frozenset(known["spec_types"]),
        removed=dict(known["removed"]),
    )


def _ask(runtime: Runtime, image: Image, binary: str, env: Mapping[str, str], *, own: bool) -> dict[str, Any]:
    words = [runtime.path, "run", "--rm", "--pull", "never", "--network", "none"]
    if not runtime.raises_limits:
        for name, (soft, hard) in own_limits().items():
            words += ["--ulimit", f"{name}={soft}:{hard}"]
    words += [] if own else ["--entrypoint", binary]
    helped = engine_facts.call((*words, image.name, "--help"), env, 60.0)
    flags, spec_types = parse_help(helped.out or helped.err)
    if helped.code != 0 or not {"--model", "--port", "--ctx-size"} <= flags:
        raise DeviceUnusable(
            "image-no-engine",
            f"{image.name} does not start a llama-server with {binary}: "
            + (helped.note or f"exit code {helped.code}, {len(flags)} flags in its --help"),
            context=helped.cause(),
            fix="--image ghcr.io/ggml-org/llama.cpp:server-cuda     # an image whose entrypoint is llama-server",
        )
    versioned = engine_facts.call((*words, image.name, "--version"), env, 60.0)
    return {
        "schema": _SCHEMA,
        "binary": binary,
        "version": parse_version(versioned.err + "\n" + versioned.out) or "unknown",
        "flags": sorted(flags),
        "spec_types": sorted(spec_types),
        "removed": parse_removed(helped.out or helped.err),
    }


def _capable(capability: int) -> bool:
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(encoding="ascii"), re.M)
    except OSError:
        return os.geteuid() == 0
    return found is not None and bool(int(found[1], 16) >> capability & 1)
