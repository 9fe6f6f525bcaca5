"""The commands of `service`: as in `cli.py`, parse, call one workflow, render, return the exit code."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from launcher.options import (
    EngineOpt,
    ForceOpt,
    JsonOpt,
    MaybeServiceArg,
    ServiceArg,
    TargetArg,
    with_overrides,
)

services = typer.Typer(help="A systemd unit around `launcher run`.", no_args_is_help=True)


@services.command("install")
@with_overrides
def service_install(
    *, target: TargetArg, given: dict[str, Any], engine: EngineOpt = None, force: ForceOpt = False,
    system: Annotated[
        bool, typer.Option("--system", help="Print a system-wide unit, to be put there by root.")
    ] = False,
    as_json: JsonOpt = False,
) -> int:  # fmt: skip
    """Write a systemd unit of yours around `launcher run`: it waits for the planned cards."""
    from launcher.render import service as screen
    from launcher.workflows import service as workflow

    done = workflow.install(target, given, engine=engine, force=force, system=system)
    return screen.show_installed(done, as_json=as_json)


@services.command("uninstall")
def service_uninstall(target: ServiceArg, as_json: JsonOpt = False) -> int:
    """Remove the unit of a target; one that runs is refused."""
    from launcher.render import service as screen
    from launcher.workflows import service as workflow

    return screen.show_removed(workflow.uninstall(target), as_json=as_json)


@services.command("show")
def service_show(target: MaybeServiceArg = None, as_json: JsonOpt = False) -> int:
    """Your units, and whether systemd runs them."""
    from launcher.render import service as screen
    from launcher.workflows import service as workflow

    return screen.show(workflow.show(target), as_json=as_json)


@services.command("wait")
def service_wait(
    cards: Annotated[list[str], typer.Argument(metavar="UUID...", help="Cards, as nvidia-smi -L names them.")],
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, metavar="S", help="Give up after S seconds.")] = 600.0,
) -> int:
    """Wait until the driver shows every card; units run this before the server."""
    from launcher.workflows import service as workflow

    workflow.wait_for_cards(cards, timeout_s, say=lambda text: typer.echo(text, err=True))
    return 0
