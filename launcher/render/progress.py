"""A line that is drawn over itself on a terminal, and a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Self, TextIO

from launcher.render import out
from launcher.units import GIB, human

_BAR = 40
_EVERY_S = 0.2
_PLAIN_EVERY_S = 15.0
_RATE_OVER_S = 20.0


class Line:
    """One moving line on a stream; `text` replaces it, `done` leaves it and goes on below."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.is_terminal = stream.isatty()
        self._drawn = False
        self._last_at = float("-inf")
        self._last = ""

    def text(self, text: str, *, force: bool = False) -> None:
        """Show a text: at most five times a second on a terminal, every 15 s elsewhere."""
        now = time.monotonic()
        every = _EVERY_S if self.is_terminal else _PLAIN_EVERY_S
        if text == self._last or (not force and now - self._last_at < every):
            return
        self._last_at, self._last = now, text
        if self.is_terminal:
            self.stream.write(f"\r{text[: out.WIDTH]}\x1b[K")
            self._drawn = True
        else:
            self.stream.write(f"{text}\n")
        self.stream.flush()

    def done(self) -> None:
        """End the moving line."""
        if self._drawn:
            self.stream.write("\n")
            self.stream.flush()
        self._drawn, self._last, self._last_at = False, "", float("-inf")


class Rate:
    """Bytes a second over the last 20 s, and what that means for the rest."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, seconds: float, done: int) -> float | None:
        """The rate after this observation, None while it cannot be told."""
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((seconds, done))
        while len(self._seen) > 2 and seconds - self._seen[0][0] > _RATE_OVER_S:
            self._seen.popleft()
        begun, first = self._seen[0]
        if seconds - begun < 1 or done <= first:
            return None
        return (done - first) / (seconds - begun)


def bar(done: int, total: int) -> str:
    """`[####........]`"""
    filled = 0 if total <= 0 else min(_BAR, _BAR * done // total)
    return f"[{'#' * filled}{'.' * (_BAR - filled)}]"


def amounts(done: int, total: int, rate: float | None) -> str:
    """`61.2 / 84.7 GiB  1.31 GB/s  18 s left`."""
    in_gib = total >= GIB
    size = f"{done / GIB:.1f} / {total / GIB:.1f} GiB" if in_gib else f"{human(done)} / {human(total)}"
    if not rate:
        return size
    speed = f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"
    left = out.duration((total - done) / rate) + " left" if done < total else ""
    return f"{size}  {speed}  {left}".rstrip()


class Stages:
    """A progress callback `(stage, done, total)` drawn on stderr; bytes or steps, by the stage's name."""

    def __init__(self, *, silent: bool = False, steps: frozenset[str] = frozenset()) -> None:
        self._line = Line(sys.stderr)
        self._silent = silent
        self._steps = steps
        self._stage = ""
        self._rate = Rate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._line.done()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage is; total 0 is unknown."""
        if self._silent:
            return
        new = stage != self._stage
        if new:
            self._line.done()
            self._stage, self._rate = stage, Rate()
        if stage.split(" ")[0] in self._steps:
            detail = f"{done} / {total}" if total else str(done)
        else:
            rate = self._rate.add(time.monotonic(), done)
            detail = amounts(done, total, rate) if total else human(done)
        shown = f"{stage:<10} {bar(done, total)} {detail}" if total else f"{stage:<10} {detail}"
        self._line.text(shown, force=new or (total > 0 and done >= total))

    def say(self, text: str) -> None:
        """One plain line."""
        if not self._silent:
            self._line.done()
            self._line.text(text, force=True)
            self._line.done()
