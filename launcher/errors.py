"""Every way in which the launcher refuses, in one family.

    LauncherError            what happened, the sum or the evidence, a fix that can be pasted
      SlugInvalid        3   a slug file that cannot be read or says the impossible
      ModelUnreadable    4   a GGUF file that is missing, damaged or not a GGUF
      DeviceUnusable     5   devices, driver or engine
      DoesNotFit         6   the plan does not fit (cards or host memory)
      Refused            7   a gate of `preflight`, `switch` or `run`
      EngineFailed       8   the engine did not start or become healthy
      VerifyFailed       9   verification or a benchmark failed
      Locked            10   another operation holds the lock
      DownloadFailed    11   a download or a hash

`reference` is a kebab-case id, listed in docs/errors.md (a test keeps the two in step).
Errors are caught in one place, `launcher.cli`, and rendered as three lines on stderr.
"""

from __future__ import annotations

from typing import ClassVar


class LauncherError(Exception):
    """One refusal: `error[reference]: message`, the evidence, `fix: ...`.

    message   one line, what happened, with the number that decided it
    context   the sum or the evidence, may span lines; empty when the message says it all
    fix       a command or an edit that can be pasted; never empty
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, reference: str, message: str, *, fix: str, context: str = "") -> None:
        super().__init__(message)
        self.reference = reference
        self.message = message
        self.context = context
        self.fix = fix


class UsageError(LauncherError):
    """An argument that cannot be understood."""

    exit_code = 2


class SlugInvalid(LauncherError):
    """A slug file that cannot be read; `context` holds every problem as file:line:col."""

    exit_code = 3


class ModelUnreadable(LauncherError):
    """A model file that is missing, damaged, incomplete or not a GGUF."""

    exit_code = 4


class DeviceUnusable(LauncherError):
    """Devices, driver or engine cannot be used."""

    exit_code = 5


class DoesNotFit(LauncherError):
    """The plan does not fit the cards or the host."""

    exit_code = 6


class Refused(LauncherError):
    """A gate said no before anything was started or stopped."""

    exit_code = 7


class EngineFailed(LauncherError):
    """The engine did not start, died while loading or never became healthy."""

    exit_code = 8


class VerifyFailed(LauncherError):
    """The running server is not what was planned."""

    exit_code = 9


class Locked(LauncherError):
    """Another operation holds the lock; the message names the holder."""

    exit_code = 10


class DownloadFailed(LauncherError):
    """A download or a hash failed."""

    exit_code = 11
