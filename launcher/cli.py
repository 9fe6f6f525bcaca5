"""The command line: parse, call one workflow, render, return the exit code. No decision is taken here.

Only typer and the standard library are imported at the top, so that `launcher --help` is fast; a command
imports its workflow and its renderer when it runs. Errors are caught in one place, `Commands.invoke`.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from launcher.cli_service import services
from launcher.errors import LauncherError
from launcher.options import (
    BackendOpt,
    BackTargetArg,
    EngineOpt,
    ForceOpt,
    JsonOpt,
    MaybeSlugArg,
    NoEngineOpt,
    RigOpt,
    SlugArg,
    TargetArg,
    YesOpt,
    with_overrides,
)

# typer >= 0.26 carries its own click, older ones import it: this is the family that typer itself reports.
_USAGE: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Commands(TyperGroup):
    """The one place that catches: a refusal becomes three lines and its class's exit code, a bug a kept log."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line; --help and --version print here, and leave like every other answer."""
        self.words = tuple(kwargs.get("args") or (args[1] if len(args) > 1 else ()))
        try:
            return super().make_context(*args, **kwargs)
        except OSError as error:
            code = _unwritten(error)
            if not (code or isinstance(error, BrokenPipeError)):
                raise
            raise typer.Exit(code) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raises typer.Exit with the exit code of contracts.md."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except (typer.Exit, typer.Abort):
            raise
        except _USAGE as error:
            code = _misused(error, self.words)
        except LauncherError as error:
            code = _refuse(error)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        except BrokenPipeError:
            code = _unwritten() or 0  # the reader has what it wanted (`| head`)
        except Exception as error:
            code = _unwritten(error) or _bug(error, debug=bool(ctx.params.get("debug")))
        raise typer.Exit(code if isinstance(code, int) else 0)


def _unwritten(cause: Exception | None = None) -> int:
    """Write out what stdout still holds; 1 and a refusal when a full disk was the cause, else 0.

    What cannot be written is dropped: the interpreter would try again at its end and exit with 120.
    """
    from launcher.render import error as render_error
    from launcher.render import out

    try:
        sys.stdout.flush()
    except OSError as error:
        out.drop(sys.stdout)
        if isinstance(cause, OSError) and not isinstance(error, BrokenPipeError):
            refusal = out.unwritten(error)
            render_error.show(refusal)
            return refusal.exit_code
    return 0


def _misused(error: Any, words: tuple[str, ...]) -> int:
    """A command line that the parser refuses, in the form of every other refusal."""
    if not error.format_message():  # no arguments at all: its help is printed
        raise error
    from launcher.workflows import usage

    command = error.ctx.command_path if getattr(error, "ctx", None) else "launcher"
    param, option = getattr(error, "param", None), getattr(error, "option_name", None)
    spellings = (*param.opts, *param.secondary_opts) if param is not None else ()
    return _refuse(usage.refusal(error.format_message(), option, words, command, spellings))


def _refuse(error: LauncherError) -> int:
    from launcher.render import error as render_error

    _unwritten()
    render_error.show(error)
    return error.exit_code


def _bug(error: Exception, *, debug: bool) -> int:
    from launcher.workflows import crash

    where = crash.keep(error, sys.argv)
    if debug:
        traceback.print_exception(error)
    what = " ".join(str(error).split())
    print(f"error[bug]: {type(error).__name__}: {what}\n  traceback: {where}", file=sys.stderr)
    print("fix: please report it with that file; nothing of it leaves this machine by itself", file=sys.stderr)
    return 1


app = typer.Typer(
    cls=Commands,
    name="launcher",
    help="Place big mixture-of-experts GGUF models on small GPUs, prove the placement, serve it with llama.cpp.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)
engines = typer.Typer(help="Which llama-server: list, choose, build, look at.", no_args_is_help=True)
app.add_typer(engines, name="engine", rich_help_panel=None)
app.add_typer(services, name="service", rich_help_panel=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        from launcher import __version__

        typer.echo(f"llama-launcher {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a bug.")] = False,
) -> None:
    """Place big mixture-of-experts GGUF models on small GPUs, prove the placement, serve it with llama.cpp."""
    del version, debug  # _print_version and Commands.invoke read them


@app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", help="Deprecated slugs too.")] = False, as_json: JsonOpt = False
) -> int:
    """Every slug: on disk or not, and whether it fits this rig."""
    from launcher.render import catalogue as screen
    from launcher.workflows import catalogue

    return screen.show_list(catalogue.entries(everything=everything), catalogue.around(), as_json=as_json)


@app.command()
def show(slug: SlugArg, as_json: JsonOpt = False) -> int:
    """One slug with every default filled in."""
    from launcher.render import catalogue as screen
    from launcher.workflows import catalogue

    return screen.show_slug(catalogue.slug(slug), as_json=as_json)


@app.command()
@with_overrides
def plan(
    *,
    target: TargetArg,
    given: dict[str, Any],
    rig: RigOpt = None,
    engine: EngineOpt = None,
    no_engine: NoEngineOpt = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Where every number came from; what one more bundle would need.")
    ] = False,
    tradeoffs: Annotated[
        bool, typer.Option("--tradeoffs", help="Other micro-batches, contexts, KV types, no drafter: each planned.")
    ] = False,
    as_json: JsonOpt = False,
) -> int:
    """What would lie where, the sum, and the ways out."""
    from launcher.render import plan as screen
    from launcher.workflows import plan as workflow
    from launcher.workflows import tradeoffs as others

    result = workflow.run(target, given, rig=rig, engine=engine, no_engine=no_engine)
    screen.show(
        result.plan, result.launch, result.inventory,
        drafter_bytes=result.drafter_bytes, explain=explain, room=others.room(result) if explain else None,
        rows=others.rows(result) if tradeoffs else None, as_json=as_json,
    )  # fmt: skip
    workflow.refuse(result.plan, result.command)
    return 0


@app.command()
@with_overrides
def preflight(
    *, target: TargetArg, given: dict[str, Any], rig: RigOpt = None, engine: EngineOpt = None,
    force: ForceOpt = False, as_json: JsonOpt = False,
) -> int:  # fmt: skip
    """All gates at once; nothing is started or stopped."""
    from launcher.render import preflight as screen
    from launcher.workflows import preflight as workflow

    result = workflow.run(target, given, rig=rig, engine=engine, force=force)
    screen.show(result.target.name, result.gates, result.plan, as_json=as_json)
    workflow.refuse(result)
    return 0


def setup(
    target: TargetArg,
    verify_only: Annotated[bool, typer.Option("--verify-only", help="Hash what is there, fetch nothing.")] = False,
    as_json: JsonOpt = False,
) -> int:
    """Download and verify the files of a slug."""
    from launcher.render import setup as screen
    from launcher.workflows import setup as workflow

    with screen.progress(as_json=as_json) as report:
        result = workflow.run(target, verify_only=verify_only, report=report)
    return screen.show(result.slug, result.files, as_json=as_json)


app.command("setup")(setup)
app.command("pull", hidden=True)(setup)


@app.command()
@with_overrides
def switch(
    *, target: BackTargetArg, given: dict[str, Any], engine: EngineOpt = None, force: ForceOpt = False,
    yes: YesOpt = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="READY with the first answer: no deep prompt proves its depth.")
    ] = False,
    as_json: JsonOpt = False,
) -> int:  # fmt: skip
    """Plan, check, stop what runs, start, compare, prove."""
    from launcher.render import switch as screen
    from launcher.workflows import switch as workflow

    with screen.Progress(as_json=as_json) as progress:
        result = workflow.run(
            target, given, engine=engine, force=force, yes=yes, quick=quick, progress=progress
        )  # fmt: skip
    return screen.show(result.record, result.planned.plan, result.planned.launch, result.audit, as_json=as_json)


@app.command()
@with_overrides
def run(
    *, target: TargetArg, given: dict[str, Any], engine: EngineOpt = None, force: ForceOpt = False,
    cards: Annotated[
        str | None, typer.Option("--cards", metavar="UUIDS", help="Refuse a plan that is not on just these cards.")
    ] = None,
) -> int:  # fmt: skip
    """Plan, check, then become llama-server in the foreground.

    For systemd, llama-swap, tmux: servers that `switch` started are left alone.
    """
    from launcher.workflows import run as workflow

    return workflow.run(target, given, engine=engine, force=force, cards=cards)


@app.command()
def status(
    check: Annotated[bool, typer.Option("--check", help="Fail when a server is not healthy.")] = False,
    as_json: JsonOpt = False,
) -> int:
    """What runs, and how it is."""
    from launcher.render import status as screen
    from launcher.workflows import status as workflow

    servers = workflow.servers()
    screen.show(servers, as_json=as_json)
    return workflow.verdict(servers, check=check)


@app.command()
def attach(slug: MaybeSlugArg = None, as_json: JsonOpt = False) -> int:
    """The loading view again; Ctrl-C ends only the view."""
    from launcher.render import switch as screen
    from launcher.workflows import attach as workflow

    with screen.Progress(as_json=as_json) as progress:
        found = workflow.run(slug, progress)
    return screen.show_attached(found.record, found.n_ctx, found.n_parallel, found.activity, as_json=as_json)


@app.command()
def logs(
    slug: MaybeSlugArg = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as lines come.")] = False,
    n: Annotated[int, typer.Option("-n", "--lines", min=0, help="Lines from the end.")] = 40,
) -> int:
    """The engine's log."""
    from launcher.workflows import status as workflow

    for text in workflow.logs(slug, n_lines=n, follow=follow):
        typer.echo(text, nl=False)
    return 0


@app.command()
def stop(slug: MaybeSlugArg = None, as_json: JsonOpt = False) -> int:
    """Stop a server of ours and what it started."""
    from launcher.render import status as screen
    from launcher.workflows import status as workflow

    return screen.show_stopped(workflow.stop(slug), as_json=as_json)


@app.command()
def history(as_json: JsonOpt = False) -> int:
    """What ended, when and why."""
    from launcher.render import status as screen
    from launcher.workflows import status as workflow

    return screen.show_history(workflow.history(), as_json=as_json)


@app.command()
def report(
    full: Annotated[
        bool, typer.Option("--full", help="With command line, environment and end of the log; redacted too.")
    ] = False,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Write report.md and report.json there.")
    ] = None,
    row: Annotated[
        str | None,
        typer.Option("--row", metavar="FILE", help="BENCHMARKS.md rows of scripts/gpu_acceptance.py's results."),
    ] = None,
    as_json: JsonOpt = False,
) -> int:
    """A page to share: this machine, what runs, planned and real."""
    from launcher.render import report as screen
    from launcher.render import results
    from launcher.workflows import report as workflow

    found = screen.texts(*workflow.run(full=full)) if row is None else results.texts(*workflow.rows(row))
    written = workflow.write(screen.files(found), out) if out is not None else ()
    return screen.show(found, written, as_json=as_json)


@engines.command("list")
def engine_list(as_json: JsonOpt = False) -> int:
    """Every llama-server, in the order in which one is chosen."""
    from launcher.render import engine as screen
    from launcher.workflows import engine as workflow

    return screen.show_list(workflow.candidates(), as_json=as_json)


@engines.command("use")
def engine_use(
    path: Annotated[str, typer.Argument(metavar="PATH|-", help="A llama-server; - goes back.")],
    as_json: JsonOpt = False,
) -> int:
    """Choose the llama-server that every command uses."""
    from launcher.render import engine as screen
    from launcher.workflows import engine as workflow

    return screen.show_chosen(workflow.use(path), as_json=as_json)


@engines.command("install")
def engine_install(backend: BackendOpt = "auto", as_json: JsonOpt = False) -> int:
    """Build the pinned llama.cpp from its source package."""
    from launcher.render import engine as screen
    from launcher.workflows import engine as workflow

    with screen.progress(as_json=as_json) as report:
        built = workflow.install(report, report.say, backend)
    return screen.show_chosen(built, as_json=as_json)


@engines.command("probe")
def engine_probe(
    path: Annotated[str | None, typer.Argument(help="A llama-server; the chosen one.")] = None, as_json: JsonOpt = False
) -> int:
    """What an engine says it can do."""
    from launcher.render import engine as screen
    from launcher.workflows import engine as workflow

    return screen.show_engine(workflow.probe(path), as_json=as_json)


def main() -> None:
    """Console script `launcher`."""
    _start(sys.argv[1:])


def switch_main() -> None:
    """Console script `switch`: the same as `launcher switch`."""
    _start(["switch", *sys.argv[1:]])


def _start(argv: list[str]) -> None:
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name outside of the locale's letters is no bug
    app(argv, prog_name="launcher")


def _open_streams() -> None:
    """Streams that were closed (`>&-`, some service managers): the next file to be opened would take their place."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115, PTH123 - it stays open to the end
