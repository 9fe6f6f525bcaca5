"""Options that commands share: one alias each, and the overrides that win over a slug.

Apart from `cli.py`, which has the commands: like it, nothing but typer and the standard library is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer


def _complete_slug(incomplete: str) -> list[str]:
    from launcher.workflows import catalogue

    return [name for name in catalogue.names() if incomplete in name]


TargetArg = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A slug (or a unique ending of one) or a .gguf file.", autocompletion=_complete_slug
    ),
]
BackTargetArg = Annotated[
    str,
    typer.Argument(
        metavar="TARGET|-",
        help="As for plan; - goes back to what ran before, with the options that it had.",
        autocompletion=_complete_slug,
    ),
]
SlugArg = Annotated[str, typer.Argument(metavar="SLUG", help="A slug.", autocompletion=_complete_slug)]
MaybeSlugArg = Annotated[
    str | None, typer.Argument(metavar="[SLUG]", help="A slug; the one that runs.", autocompletion=_complete_slug)
]
ServiceArg = Annotated[str, typer.Argument(metavar="TARGET", help="The target of a unit, or a unique ending of it.")]
MaybeServiceArg = Annotated[str | None, typer.Argument(metavar="[TARGET]", help="The target of a unit; all of them.")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
YesOpt = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before a running server is stopped.")]
ForceOpt = Annotated[bool, typer.Option("--force", help="Serve a slug that is not in production; opens no other gate.")]
RigOpt = Annotated[str | None, typer.Option("--rig", metavar="FILE", help="Plan for the rig in this file.")]
EngineOpt = Annotated[str | None, typer.Option("--engine", metavar="PATH", help="The llama-server to use.")]
BackendOpt = Annotated[
    str, typer.Option("--backend", metavar="auto|cpu|cuda", help="auto: cuda where nvcc and a driver are.")
]
NoEngineOpt = Annotated[bool, typer.Option("--no-engine", help="Formulas alone: no llama-server is run.")]

_UNIFIED = ("--unified/--no-unified", "-kvu/-no-kvu", "--kv-unified/--no-kv-unified")
# name -> (type, option spellings, metavar, help): ours first, llama.cpp's beside it.
OVERRIDES: dict[str, tuple[Any, tuple[str, ...], str | None, str]] = {
    "ctx": (str, ("--ctx",), "N", "Context of one stream, as 200k."),
    "ctx_total": (str, ("-c", "--ctx-size"), "N", "Context of all streams together, as llama.cpp counts."),
    "parallel": (int, ("--parallel", "-np"), "N", "Streams."),
    "batch": (int, ("--batch", "-b", "--batch-size"), "N", "Logical batch."),
    "ubatch": (int, ("--ubatch", "-ub", "--ubatch-size"), "N", "Micro-batch."),
    "kv": (str, ("--kv",), "TYPE", "KV cache type: f16, q8_0 or K/V."),
    "type_k": (str, ("--cache-type-k", "-ctk"), "TYPE", "KV cache type of K."),
    "type_v": (str, ("--cache-type-v", "-ctv"), "TYPE", "KV cache type of V."),
    "unified": (
        bool,
        _UNIFIED,
        None,
        "One KV cache for all streams.",
    ),
    "flash_attn": (str, ("--flash-attn", "-fa"), "on|off|auto", "Flash attention."),
    "devices": (str, ("--devices", "-dev", "--device"), "LIST", "Devices in order: 0,1 or CUDA0,CUDA1; -CUDA1 omits."),
    "tensor_split": (str, ("--tensor-split", "-ts"), "N,N", "Layers of each device."),
    "residency": (str, ("--residency",), "auto|none", "Expert bundles on the devices."),
    "margin": (str, ("--margin",), "SIZE", "Memory kept free on each device."),
    "reserve": (list[str], ("--reserve",), "NAME=SIZE", "Memory of a device that is not ours: CUDA0=6GiB."),
    "drafter": (str, ("--drafter", "-md", "--model-draft", "--spec-draft-model"), "FILE|off", "Draft model."),
    "drafter_device": (
        str,
        ("--drafter-device", "-devd", "--device-draft", "--spec-draft-device"),
        "NAME|host",
        "Device of the draft model.",
    ),
    "drafter_layers": (
        int,
        ("--drafter-layers", "-ngld", "--gpu-layers-draft", "--spec-draft-ngl"),
        "N",
        "Layers of the draft model on devices, counted from its last, the output.",
    ),
    "drafter_experts": (str, ("--drafter-experts",), "auto|host", "Routed experts of the draft model."),
    "draft_max": (int, ("--draft-max", "--spec-draft-n-max"), "N", "Tokens drafted at once."),
    "mmproj": (str, ("--mmproj", "-mm"), "FILE|off", "Projector of a model that sees or hears."),
    "load_mode": (str, ("--load-mode", "-lm"), "none|mmap|...", "How the file is read."),
    "split_mode": (str, ("--split-mode", "-sm"), "layer", "Only layer: the others cut bundles apart."),
    "threads": (int, ("--threads", "-t"), "N", "CPU threads."),
    "numa": (
        str,
        ("--numa",),
        "MODE",
        "auto, off, bind[:NODE], interleave[:NODES], or the engine's distribute, isolate, numactl.",
    ),
    "container": (str, ("--container",), "docker|podman|compose|off", "Serve in a container; auto is what is here."),
    "image": (str, ("--image",), "IMAGE", "Container image of llama-server; wins over engine.image of the slug."),
    "host": (str, ("--host",), "ADDRESS", "Address to listen on."),
    "port": (int, ("--port",), "N", "Port to listen on."),
}


def with_overrides(command: Callable[..., int]) -> Callable[..., int]:
    """The command with every override as an option; it gets those that were given as the mapping `given`."""

    @wraps(command)
    def run(**kwargs: Any) -> int:
        given = {name: kwargs.pop(name) for name in OVERRIDES}
        return command(**kwargs, given={k: v for k, v in given.items() if v is not None and v != []})

    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[n]) for n, p in inspect.signature(command).parameters.items() if n != "given"]
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, typer.Option(*spellings, metavar=metavar, help=text)],
        )
        for name, (kind, spellings, metavar, text) in OVERRIDES.items()
    ]
    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
    return run
