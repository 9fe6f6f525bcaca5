"""`service` as people read it: what was written, what is worth saying, the lines to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launcher.render import document, out
from launcher.structs import Service

if TYPE_CHECKING:
    from rich.text import Text


def show_installed(service: Service, *, as_json: bool = False) -> int:
    """Print where the unit lies and what to paste; a system-wide one itself on stdout, all else on stderr."""
    if as_json:
        out.document(document.service_document([service]))
    elif service.path is None:
        out.show(service.text.rstrip("\n").split("\n"))
        out.show(_around(service), stderr=True)
    else:
        out.show([out.line(("written  ", "ok"), service.path), *_around(service)])
    return 0


def show_removed(service: Service, *, as_json: bool = False) -> int:
    """Print what was removed."""
    if as_json:
        out.document(document.service_document([service]))
    else:
        out.show([f"removed  {service.path}", *_around(service)])
    return 0


def show(services: Sequence[Service], *, as_json: bool = False) -> int:
    """Print every unit of ours with its text."""
    if as_json:
        out.document(document.service_document(services))
        return 0
    if not services:
        out.show(["no service is installed (launcher service install TARGET)"])
    for service in services:
        state = service.state or "no systemd answers"
        out.show([out.line((service.target, "head"), f"  {state}  {service.path}"), service.text.rstrip("\n")])
        out.show(_around(service))
    return 0


def _around(service: Service) -> Iterator[Text | str]:
    if service.cards:
        yield f"cards    {', '.join(service.cards)}"
    for note in service.notes:
        first, *more = out.fold(note, "", out.WIDTH - 9)
        yield out.line(("note     ", "note"), first)
        yield from (" " * 9 + part for part in more)
    for command in service.commands:
        yield f"next     {command}"
