"""A launch in a container: which program runs it, the image, and everything that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A program that runs containers, and what it may do here. None is what it does not say.

    kind               'docker' or 'podman'; path is its client
    compose            words of the compose implementation that is used; empty: `run`, without compose
    limits_memory      whether its control groups can limit memory
    most_memlock_bytes what it may let a container lock; None: without limit
    raises_limits      false: a container gets no higher limit than this process has
    nvidia             whether it can hand on NVIDIA cards (docker: its runtime)
    cdi                devices that the CDI files name, as `nvidia.com/gpu=GPU-...` (podman)
    """

    kind: str
    path: str
    version: str
    compose: tuple[str, ...] = ()
    rootless: bool = False
    limits_memory: bool | None = None
    most_memlock_bytes: int | None = None
    raises_limits: bool = True
    nvidia: bool | None = None
    cdi: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that lies on this machine. entrypoint: the words that it starts with, empty when it names none."""

    name: str
    digest: str
    entrypoint: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder or file of this machine, read-only in the container at `target`."""

    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container, whole. The network is the host's: the server listens where its command line says.

    entrypoint    instead of the image's own; empty: the image's
    command       words after the entrypoint
    environment   what is set inside; nothing else of this machine's environment arrives there
    passed        names whose value comes from the client's environment, so that it stands in no file and no argv
    cards         UUIDs of NVIDIA cards
    memory_bytes  limit of its control group; None where the runtime cannot set one
    memlock_bytes RLIMIT_MEMLOCK; None: without limit
    ulimits       other limits, name -> (soft, hard), -1 without limit; where the runtime's own cannot be had
    """

    runtime: Runtime
    image: Image
    name: str
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...]
    mounts: tuple[Mount, ...]
    environment: Mapping[str, str]
    passed: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()
    memory_bytes: int | None = None
    memlock_bytes: int | None = None
    ulimits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
