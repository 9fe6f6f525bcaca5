"""`setup`: bring the files of a slug to this machine and check them."""

from __future__ import annotations

from launcher.errors import UsageError
from launcher.facts.fetch import Progress
from launcher.weights import hub
from launcher.weights.hub import SetupResult
from launcher.workflows import target as targets


def run(text: str, *, verify_only: bool, report: Progress) -> SetupResult:
    """Raises UsageError (setup-needs-slug, slug-unknown), DownloadFailed, ModelUnreadable, Locked."""
    target = targets.resolve(text)
    if target.slug is None:
        raise UsageError(
            "setup-needs-slug", f"{text} is a file: it names no repository to fetch from", fix="launcher list --all"
        )
    return hub.setup(target.slug, progress=report, verify_only=verify_only)
