"""Least free memory while something runs: every card and the host, looked at again and again in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import psutil

from launcher.facts import nvml


def free_now() -> dict[str, int]:
    """UUID of every card, and `host`, -> free (available) bytes now."""
    cards = {c.uuid: c.free_bytes for c in nvml.nvml_cards() if c.uuid and c.free_bytes is not None}
    return {**cards, "host": int(psutil.virtual_memory().available)}


@dataclass(slots=True)
class Watch:
    """Context manager; `least` holds what was free at the worst moment, by name.

    look     what is free now, by name
    every_s  pause between two looks
    """

    look: Callable[[], Mapping[str, int]] = free_now
    every_s: float = 0.5
    least: dict[str, int] = field(default_factory=dict)
    samples: int = 0
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def _take(self) -> None:
        for name, free in self.look().items():
            self.least[name] = min(free, self.least.get(name, free))
        self.samples += 1

    def _run(self) -> None:
        while not self._end.wait(self.every_s):
            self._take()

    def __enter__(self) -> Self:
        self._take()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end.set()
        if self._thread:
            self._thread.join()
        self._take()
