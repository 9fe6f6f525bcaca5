"""Gates of the engine: what it can be told, what it would read beside our command line, what its kernels can do."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import LauncherError
from launcher.facts.cuda_kernels import STOCK, CudaKernels, cuda_kernels
from launcher.facts.slug_values import OWNED_FLAGS, spelled
from launcher.facts.surroundings import Surroundings, config_keys
from launcher.serve import argv as command_line
from launcher.structs import Engine, Gate, Plan, Slug
from launcher.units import engine_label

SYSTEM_CONFIG = Path("/etc/llama.cpp/config.ini")
_FLAG = re.compile(r"^--?[A-Za-z]")
# No attention kernel of CUDA reads it, whatever was compiled (fattn.cu: ggml_cuda_fattn_kv_type_supported).
_NEVER = "iq4_nl"


def of_error(error: LauncherError, fix: str | None = None) -> Gate:
    """The closed gate of a refusal: the same id, words and fix."""
    return Gate(name=error.reference, ok=False, detail=error.message, fix=fix or error.fix, context=error.context)


def engine_gates(
    slug: Slug | None, plan: Plan | None, engine: Engine | None, error: LauncherError | None
) -> Iterator[Gate]:
    """Whether there is an engine, and whether it can be told what the plan and the slug say."""
    if error is not None:
        yield of_error(error)
        return
    if engine is None:
        yield Gate(name="engine", ok=True, note=True, detail="no engine was looked for")
        return
    missing = [need for need in (slug.engine.needs if slug else ()) if not engine.can(need)]
    if plan is not None:
        missing += [flag for flag in command_line.missing_flags(plan, engine, slug) if f"flag:{flag}" not in missing]
        if s := plan.settings.drafter_type:
            need = f"spec-type:{s}"
            missing += [need] if s != "none" and not engine.can(need) and need not in missing else []
    if missing:
        yield of_error(command_line.lacks(engine, tuple(missing)))
    unknown = tuple(_unknown_flags(slug, engine)) if slug else ()
    yield from unknown
    if not missing and not unknown:
        yield Gate(name="engine", ok=True, detail=f"{engine_label(engine.version)} ({engine.found_by})")
    yield from _system_config(plan)


def _unknown_flags(slug: Slug, engine: Engine) -> Iterator[Gate]:
    """Flags of `extra_args` that this engine would refuse, when a server that works was stopped for it already."""
    for at, word in enumerate(slug.extra_args):
        flag = spelled(word)
        # The engine takes no `--flag=value`: the whole word is its name.
        if not _FLAG.match(word) or flag in engine.flags:
            continue
        why = engine.removed.get(flag, "")
        near = difflib.get_close_matches(flag, sorted(engine.flags), n=1, cutoff=0.75)
        guess = "" if why or not near else f"; did you mean {near[0]}?"
        name, equals, _ = flag.partition("=")
        if equals and name in engine.flags:
            guess = f"; write {name} and its value as two words"
        yield Gate(
            name="engine-flag-unknown",
            ok=False,
            detail=f"extra_args[{at}]: {word} is no flag of {engine_label(engine.version)}"
            + (f": it was removed, {why}" if why else guess),
            context=f"engine: {engine.path}, found by {engine.found_by}; its --help names {len(engine.flags)} flags",
            fix=f"${{EDITOR:-vi}} {shlex.quote(slug.path)}     # take it out of extra_args",
        )


def _system_config(plan: Plan | None) -> Iterator[Gate]:
    """Keys of the engine's system-wide config that a plan owns; it cannot be switched off for one launch."""
    found = {key: value for key, value in config_keys(SYSTEM_CONFIG).items() if key in _owned_keys()}
    if not found:
        return
    keys = ", ".join(f"{key} = {value}" for key, value in found.items())
    yield Gate(
        name="engine-config",
        ok=False,
        detail=f"{SYSTEM_CONFIG} sets {keys}, which the plan decides; the engine reads it first",
        context=_against(plan, found),
        fix=f"sudo ${{EDITOR:-vi}} {SYSTEM_CONFIG}     # comment these lines out",
    )


def _owned_keys() -> frozenset[str]:
    tables = (command_line.SPELLINGS, command_line.SWITCHES)
    ours = {word for table in tables for words in table.values() for word in words}
    return frozenset(word.lstrip("-") for word in ours | OWNED_FLAGS.keys())


def _against(plan: Plan | None, found: dict[str, str]) -> str:
    """What the plan says where the config says something else; empty without a plan."""
    if plan is None:
        return ""
    s = plan.settings
    said = {
        "n_ctx_total": plan.n_ctx_total, "n_parallel": s.n_parallel, "n_batch": s.n_batch, "n_ubatch": s.n_ubatch,
        "threads": s.threads, "type_k": s.type_k, "type_v": s.type_v, "flash_attn": s.flash_attn,
        "load_mode": s.load_mode, "n_gpu_layers": 999 if plan.devices else 0,
    }  # fmt: skip
    names = {word.lstrip("-"): key for key, words in command_line.SPELLINGS.items() for word in words}
    both = [f"{k} {v}, the plan {said[names[k]]}" for k, v in found.items() if names.get(k) in said]
    return "the config says " + "; ".join(both) if both else ""


def environment_notes(around: Surroundings) -> Iterator[Gate]:
    """Settings of the engine that lie about here and that it is not given: who wrote them expects them to count."""
    if names := around.engine_variables:
        yield Gate(
            name="engine-environment",
            ok=True,
            note=True,
            detail=f"{', '.join(names)}: set here and not passed on, they would come before the plan's own flags",
            fix=f"unset {' '.join(names)}",
        )
    if around.user_config is not None and (keys := config_keys(around.user_config)):
        yield Gate(
            name="engine-user-config",
            ok=True,
            note=True,
            detail=f"{around.user_config} sets {', '.join(keys)}: it is not read by servers that are started here",
            fix=f"${{EDITOR:-vi}} {shlex.quote(str(around.user_config))}     # what must count belongs into the slug",
        )


def kv_kernels(plan: Plan, engine: Engine | None) -> Iterator[Gate]:
    """Closed where CUDA has no attention kernel for the cache types: attention would run on the CPU, unannounced.

    Measured by llama.cpp's users on an RTX 3090 with q4_1/q8_0 and up to 120K tokens: prefill of 34 tokens a second,
    659 to 1,094 with the kernel compiled.
    """
    pair = plan.settings.type_k, plan.settings.type_v
    cards = [d.device.name for d in plan.devices if d.device.backend == "cuda" and d.layers]
    if not cards or plan.settings.flash_attn == "off" or pair in STOCK:
        return
    shown = f"K {pair[0]} with V {pair[1]}"
    found = cuda_kernels(engine) if engine is not None and _NEVER not in pair else None
    if found is not None and pair in found.pairs:
        yield Gate(name="kv-kernel", ok=True, detail=f"{shown}: compiled into {found.file}")
    elif found is not None and found.converts and _NEVER not in pair:
        yield Gate(
            name="kv-kernel",
            ok=True,
            note=True,
            detail=f"{shown}: not compiled into {found.file}, which has {_pairs(found)}; converted to f16, slower",
            fix=f"--kv {_nearest(*pair)}",
        )
    elif engine is not None and found is None and _NEVER not in pair:
        yield Gate(
            name="kv-kernel",
            ok=True,
            note=True,
            detail=f"{shown}: a stock CUDA build has no attention kernel for that, and {engine.path} does not show "
            "its own; without one attention runs on the CPU",
            fix=f"--kv {_nearest(*pair)}",
        )
    elif engine is not None or _NEVER in pair:
        built = "" if _NEVER in pair else "     # or an engine built with the pair in GGML_CUDA_FA_QUANTS"
        has = f"{found.file} has {_pairs(found)}" if found else f"no build has one for {_NEVER}"
        yield Gate(
            name="kv-no-kernel",
            ok=False,
            detail=f"{shown}: no attention kernel on {', '.join(cards)}, so attention would run on the CPU",
            context=f"{has}\nmeasured elsewhere for such a pair: prefill 34 tokens a second in place of 659 to 1,094",
            fix=f"--kv {_nearest(*pair)}{built}",
        )


def _pairs(found: CudaKernels) -> str:
    return ", ".join(sorted(k if k == v else f"{k}/{v}" for k, v in found.pairs))


def _nearest(type_k: str, type_v: str) -> str:
    """The stock pair of no more bytes than the larger of both types, where there is one."""
    if "f16" in (type_k, type_v) or "f32" in (type_k, type_v):
        return "f16"
    if "bf16" in (type_k, type_v):
        return "bf16"
    return "q8_0" if "q8_0" in (type_k, type_v) else "q4_0"
