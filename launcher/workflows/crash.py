"""Keep the traceback of a bug in a log file, with what is needed to look into it."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from launcher import __version__
from launcher.facts import paths


def keep(error: BaseException, argv: Sequence[str]) -> Path:
    """Write the traceback below the state folder (the temporary folder when that cannot be written)."""
    import tempfile

    text = "\n".join(
        [
            f"llama-launcher {__version__}, Python {platform.python_version()}, {platform.platform()}",
            f"command: {shlex.join(argv)}",
            f"executable: {sys.executable}",
            "",
            "".join(traceback.format_exception(error)),
        ]
    )
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
    for folder in (paths.state_dir() / "crashes", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            where = folder / name
            where.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:
            continue
        return where
    return Path(os.devnull)
