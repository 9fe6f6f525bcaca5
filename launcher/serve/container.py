"""A launch inside of a container: what it is given, and whether this machine can give it that. Pure but for links.

The engine's command line stays as planned: every file has the same name inside as outside, and the network is the
host's, so that `--host 127.0.0.1` means what it says and no port has to be published.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping

from launcher.facts import links
from launcher.serve import argv as command_line
from launcher.serve import state
from launcher.serve.numa import split_policy
from launcher.structs import Container, Gate, Host, Image, Launch, Plan, Runtime
from launcher.units import MIB, gib, human, mib

# What its control group holds beside the sum of the plan: pages of files that are being read, the sockets of the
# kernel. The sum itself is an upper bound of the process.
_BESIDE_BYTES = 512 * MIB
_BESIDE_SHARE = 20  # one twentieth of the sum
# Files that a command line names beside the models.
_ALONE = ("chat_template_file", "api_key_file")
# Of the launcher's environment these arrive inside, by name alone: the value stands in no file and in no argv.
_PASSED = ("LLAMA_API_KEY",)
_LOCKED = ("experts", "embedding", "dense", "output", "drafter")


def contained(
    launch: Launch,
    runtime: Runtime,
    image: Image,
    *,
    files: Iterable[str],
    home: str,
    limits: Mapping[str, tuple[int, int]],
) -> Container:
    """The container of a launch.

    files   every file of the model, the drafter and the projector, by the names that the command line uses
    home    folder of our records: two of them may run the same slug on one machine
    limits  `nofile` and `nproc` of this process, (soft, hard): all that a runtime without CAP_SYS_RESOURCE can give
    """
    words = split_policy(launch.argv)[1]  # numactl is no part of an image
    said = command_line.parse_back(launch.argv)
    others = [str(said[key]) for key in _ALONE if key in said]
    return Container(
        runtime=runtime,
        image=image,
        name=name_of(launch.plan.target, home),
        entrypoint=() if image.entrypoint else (words[0],),
        command=words[1:],
        mounts=links.mounts_for(files, others),
        environment=dict(launch.env_set),
        passed=tuple(name for name in _PASSED if launch.env.get(name)),
        cards=tuple(dict.fromkeys(d.device.uuid for d in launch.plan.devices if d.device.uuid)),
        memory_bytes=limit_bytes(launch.plan) if runtime.limits_memory is not False else None,
        memlock_bytes=runtime.most_memlock_bytes,
        ulimits={} if runtime.raises_limits else dict(limits),
    )


def limit_bytes(plan: Plan) -> int:
    """Bytes that the container may hold: the host sum of the plan, a twentieth of it and 512 MiB, in whole MiB."""
    needed = plan.host.required_bytes
    return -(-(needed + needed // _BESIDE_SHARE + _BESIDE_BYTES) // MIB) * MIB


def name_of(target: str, home: str) -> str:
    """Name of a target's container: a safe spelling of it, and eight digits of what it and the home folder are."""
    digits = hashlib.sha256(f"{home}\n{target}".encode()).hexdigest()[:8]
    safe = re.sub(r"[^a-z0-9]+", "-", state.stem(target).lower()).strip("-")[-60:].strip("-")
    return f"llama-launcher-{safe or 'model'}-{digits}"


def gates(box: Container, plan: Plan, host: Host, files: Iterable[str]) -> Iterator[Gate]:
    """Whether the container can be had as planned: files, memory, locked memory, cards."""
    yield _mounts(box, tuple(files))
    yield _memory(box, plan, host)
    yield from _memlock(box, plan)
    yield from _cards(box, plan)


def _mounts(box: Container, files: tuple[str, ...]) -> Gate:
    system = next((m for m in box.mounts if m.target in _SYSTEM), None)
    lost = [path for path in files if links.resolved(path, box.mounts) is None]
    nowhere = links.missing_points(box.mounts)
    if system is not None:
        lost = lost or list(files[:1])
    if not lost and not nowhere:
        return Gate(
            name="container-mounts",
            ok=True,
            detail=f"{len(files)} files and the targets of their links lie in {len(box.mounts)} mounts, read-only",
        )
    if system is not None:
        what = f"{lost[0]} lies in {system.target}, which would hide that folder of the image"
    elif nowhere:
        what = f"a link leads to {nowhere[0].target}, which cannot be mounted inside of another mount"
    else:
        what = f"{len(lost)} of {len(files)} files do not open inside of the container: {lost[0]}"
    first = shlex.quote(lost[0] if lost else files[0])
    return Gate(
        name="container-mount-cut",
        ok=False,
        detail=what,
        context="\n".join(f"{m.source} at {m.target}" for m in box.mounts),
        fix=f"cp -L {first} ~/models/     # a folder that holds the file itself, then: export MODEL_DIR=~/models",
    )


_SYSTEM = frozenset({"/", "/app", "/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr"})


def _memory(box: Container, plan: Plan, host: Host) -> Gate:
    if box.memory_bytes is None:
        return Gate(
            name="container-memory",
            ok=True,
            note=True,
            detail=f"this {box.runtime.kind} cannot limit memory: nothing ends the server when it grows past the plan",
            fix=f"{box.runtime.kind} info     # its control groups and what they can limit",
        )
    needed, beside = plan.host.required_bytes, box.memory_bytes - plan.host.required_bytes
    sums = f"{mib(needed)} of the plan + {mib(beside)} beside = {mib(box.memory_bytes)} MiB"
    if box.memory_bytes <= host.available_bytes:
        return Gate(name="container-memory", ok=True, detail=f"memory limit {sums}, of {mib(host.available_bytes)}")
    return Gate(
        name="container-memory-short",
        ok=False,
        detail=f"a container needs {sums}, {gib(host.available_bytes)} GiB are available, "
        f"short {gib(box.memory_bytes - host.available_bytes)}",
        fix=f"launcher plan {shlex.quote(plan.target)} --tradeoffs     # what needs less",
    )


def _memlock(box: Container, plan: Plan) -> Iterator[Gate]:
    """Closed where `mlock` could not lock inside: the engine only warns, and its memory is swapped out all the same."""
    mode, limit = plan.settings.load_mode, box.memlock_bytes
    if "mlock" not in mode.split("+"):
        return
    needed = sum(plan.host.terms.get(term, 0) for term in _LOCKED)
    if limit is None or needed <= limit:
        most = "without limit" if limit is None else f"{mib(needed)} of {mib(limit)} MiB"
        yield Gate(name="container-memlock", ok=True, detail=f"memory may be locked: {most}")
        return
    yield Gate(
        name="container-memlock-short",
        ok=False,
        detail=f"load mode {mode} locks {mib(needed)} MiB, {box.runtime.kind} may let a container lock {human(limit)}",
        context="a rootless runtime, or one without CAP_SYS_RESOURCE, gives no more than this shell has",
        fix="--load-mode none     # or, as root: prlimit --memlock=unlimited, and docker instead of podman",
    )


def _cards(box: Container, plan: Plan) -> Iterator[Gate]:
    strange = [d.device.name for d in plan.devices if d.device.backend != "rpc" and not d.device.uuid]
    if strange:
        yield Gate(
            name="container-device",
            ok=False,
            detail=f"{', '.join(strange)} cannot be handed to a container: only NVIDIA cards, by UUID, can",
            fix="--devices none     # or cards alone; without a container every device is used",
        )
    if not box.cards:
        return
    lost = [u for u in box.cards if f"nvidia.com/gpu={u}" not in box.runtime.cdi]
    if box.runtime.kind == "podman" and lost:
        yield Gate(
            name="container-cdi-missing",
            ok=False,
            detail=f"podman finds {len(box.cards) - len(lost)} of {len(box.cards)} cards by UUID in /etc/cdi "
            f"and /var/run/cdi; missing: {', '.join(lost)}",
            fix="sudo nvidia-ctk cdi generate --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml",
        )
    elif box.runtime.kind == "docker" and box.runtime.nvidia is False:
        yield Gate(
            name="container-no-nvidia",
            ok=False,
            detail=f"docker knows no runtime called nvidia, and the plan is on {len(box.cards)} cards",
            fix="sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker",
        )
    else:
        yield Gate(name="container-cards", ok=True, detail=f"{len(box.cards)} cards by UUID")
