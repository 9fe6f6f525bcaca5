"""Plan -> the exact command line and environment of llama-server, in this engine's spellings, and back.

Duty: say what the plan says, once and explicitly. Nothing is left to the engine's defaults that moves a byte:
context, streams, split, batch sizes, cache types, prompt cache, checkpoints and fit are always written out.
It reads no file and starts nothing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from launcher.errors import DeviceUnusable, SlugInvalid
from launcher.facts.slug_values import fights, value_of
from launcher.planner.rules import CATCH_ALL
from launcher.serve import numa
from launcher.structs import Engine, Launch, Plan, Slug
from launcher.units import MIB

# Every flag that we write: key -> spellings, the one we like first. parse_back reads the same table.
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "rpc": ("--rpc",),
    "model": ("-m", "--model"),
    "n_ctx_total": ("-c", "--ctx-size"),
    "n_parallel": ("-np", "--parallel"),
    "n_gpu_layers": ("-ngl", "--n-gpu-layers", "--gpu-layers"),
    "devices": ("-dev", "--device"),
    "split_mode": ("-sm", "--split-mode"),
    "tensor_split": ("-ts", "--tensor-split"),
    "threads": ("-t", "--threads"),
    "n_batch": ("-b", "--batch-size"),
    "n_ubatch": ("-ub", "--ubatch-size"),
    "flash_attn": ("-fa", "--flash-attn"),
    "type_k": ("-ctk", "--cache-type-k"),
    "type_v": ("-ctv", "--cache-type-v"),
    "load_mode": ("--load-mode", "-lm"),
    "numa": ("--numa",),
    "cache_ram": ("--cache-ram", "-cram"),
    "checkpoints": ("--ctx-checkpoints", "-ctxcp", "--swa-checkpoints"),
    "host": ("--host",),
    "port": ("--port",),
    "alias": ("--alias", "-a"),
    "fit": ("--fit", "-fit"),
    "verbosity": ("-lv", "--verbosity", "--log-verbosity"),
    "override_tensor": ("-ot", "--override-tensor"),
    "drafter": ("-md", "--model-draft", "--spec-draft-model"),
    "spec_type": ("--spec-type",),
    "draft_n_max": ("--spec-draft-n-max", "--draft-max"),
    "draft_devices": ("-devd", "--device-draft", "--spec-draft-device"),
    "draft_n_gpu_layers": ("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"),
    "draft_override_tensor": ("-otd", "--override-tensor-draft", "--spec-draft-override-tensor"),
    "mmproj": ("--mmproj", "-mm"),
    "reasoning": ("-rea", "--reasoning"),
    "reasoning_budget": ("--reasoning-budget",),
    "chat_template": ("--chat-template",),
    "chat_template_file": ("--chat-template-file",),
    "api_key_file": ("--api-key-file",),
}
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "kv_unified": ("-kvu", "--kv-unified"),
    "kv_separate": ("-no-kvu", "--no-kv-unified"),
    "metrics": ("--metrics",),
    "no_mmap": ("--no-mmap",),
    "mlock": ("--mlock",),
    "direct_io": ("--direct-io", "-dio"),
    "log_jsonl": ("--log-jsonl",),
}
SAMPLING: Mapping[str, tuple[str, ...]] = {
    "temperature": ("--temp", "--temperature"),
    "top_p": ("--top-p",),
    "top_k": ("--top-k",),
    "min_p": ("--min-p",),
    "typical_p": ("--typical", "--typical-p"),
    "top_n_sigma": ("--top-nsigma", "--top-n-sigma"),
    "repeat_penalty": ("--repeat-penalty",),
    "repeat_last_n": ("--repeat-last-n",),
    "presence_penalty": ("--presence-penalty",),
    "frequency_penalty": ("--frequency-penalty",),
    "seed": ("--seed", "-s"),
}
_INTEGER_SAMPLING = frozenset({"top_k", "repeat_last_n", "seed"})

# What the old switches say for a load mode; `mmap` was their default.
_OLD_LOAD_MODES: Mapping[str, tuple[str, ...]] = {
    "auto": (),
    "mmap": (),
    "none": ("no_mmap",),
    "mlock": ("no_mmap", "mlock"),
    "mmap+mlock": ("mlock",),
    "dio": ("no_mmap", "direct_io"),
}

# Settings of the engine that arrive through the environment would come before every rule of ours.
_SCRUB = re.compile(r"^(LLAMA_(?!API_KEY$)|GGML_|HF_TOKEN$|HUGGING_FACE_HUB_TOKEN$|MTMD_BACKEND_DEVICE$)")


@dataclass(slots=True)
class _Line:
    """The command line being written; `missing` are needed flags that this engine lacks."""

    engine: Engine | None
    argv: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def spell(self, spellings: tuple[str, ...]) -> str | None:
        """The spelling that this engine knows; without an engine the first."""
        if self.engine is None:
            return spellings[0]
        return next((s for s in spellings if s in self.engine.flags), None)

    def need(self, key: str, *values: str) -> None:
        """Write a flag that the plan cannot do without."""
        spellings = SPELLINGS[key] if key in SPELLINGS else SWITCHES[key]
        spelling = self.spell(spellings)
        if spelling is None:
            self.missing.append(max(spellings, key=len))
        else:
            self.argv += (spelling, *values)

    def want(self, spellings: tuple[str, ...], reason: str, *values: str) -> bool:
        """Write a flag when the engine has it; else note why that does no harm."""
        spelling = self.spell(spellings)
        if spelling is None:
            self.left_out.append(f"{max(spellings, key=len)}: {reason}")
            return False
        self.argv += (spelling, *values)
        return True


def build(
    plan: Plan,
    *,
    engine: Engine | None,
    host: str,
    port: int,
    alias: str,
    slug: Slug | None,
    base_env: Mapping[str, str],
    empty_config: str,
    mmproj: str | None = None,
) -> Launch:
    """The launch of a plan.

    engine        None: no engine was asked, the newest spellings are written (documents only)
    mmproj        path of the projector; None means that none is loaded
    empty_config  an empty folder of ours for XDG_CONFIG_HOME: the engine reads llama.cpp/config.ini there

    Raises DeviceUnusable (id engine-lacks) naming every flag that the plan needs and this engine has not, SlugInvalid
    (id slug-invalid) for extra arguments that would undo the plan.
    """
    if slug is not None:
        _check_extra_args(slug)
    line = _assemble(plan, engine=engine, host=host, port=port, alias=alias, slug=slug, mmproj=mmproj)
    if line.missing and engine is not None:
        raise lacks(engine, tuple(line.missing))
    env, env_set = environment(plan, base_env=base_env, empty_config=empty_config)
    return Launch(plan=plan, argv=tuple(line.argv), env=env, env_set=env_set, host=host, port=port, alias=alias)


def missing_flags(plan: Plan, engine: Engine, slug: Slug | None) -> tuple[str, ...]:
    """Flags that `build` would need for this plan and that this engine lacks."""
    return tuple(_assemble(plan, engine=engine, host="127.0.0.1", port=0, alias="x", slug=slug, mmproj=None).missing)


def left_out(plan: Plan, engine: Engine, slug: Slug | None) -> tuple[str, ...]:
    """Flags that `build` leaves out because this engine has not got them: `--flag: why that is no loss`."""
    return tuple(_assemble(plan, engine=engine, host="127.0.0.1", port=0, alias="x", slug=slug, mmproj=None).left_out)


def lacks(engine: Engine, abilities: tuple[str, ...]) -> DeviceUnusable:
    """The refusal for abilities (flags or `spec-type:x`) that an engine has not got."""
    return DeviceUnusable(
        "engine-lacks",
        f"this engine lacks {', '.join(abilities)} ({engine.version})",
        context=f"engine: {engine.path}, found by {engine.found_by}; its --help does not name them",
        fix="launcher engine install     # or --engine PATH for a newer llama-server",
    )


def dry_run_argv(launch: Launch, port: int) -> tuple[str, ...]:
    """The engine's own command line for its no-allocation pass: `--fit on`, `--log-jsonl`, loopback, `port`.

    The engine binds its port before it measures, so a free one must stand in for the real one.
    """
    argv = list(numa.split_policy(launch.argv)[1])  # nothing is allocated: no memory to place
    for key, value in (("fit", "on"), ("host", "127.0.0.1"), ("port", str(port))):
        at = next((i for i, word in enumerate(argv) if word in SPELLINGS[key]), None)
        if at is not None:
            argv[at + 1] = value
    return (*argv, "--log-jsonl")


def environment(
    plan: Plan, *, base_env: Mapping[str, str], empty_config: str
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """(the child's whole environment, what of it we set): the engine's own variables are scrubbed.

    Cards are named to CUDA by UUID in plan order, so that `CUDA0` means the same card to the plan and the engine.
    """
    env_set = {"XDG_CONFIG_HOME": empty_config, "LC_ALL": "C"}
    cuda = [d.device for d in plan.devices if d.device.backend == "cuda"]
    if cuda:
        env_set["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        uuids = tuple(dict.fromkeys(d.uuid for d in cuda if d.uuid))
        in_our_order = [d.name for d in cuda] == [f"CUDA{i}" for i in range(len(cuda))]
        # Names that were not renumbered for our order would mean other cards once only these are visible.
        if in_our_order and all(d.uuid for d in cuda):
            env_set["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
        # GGML_CUDA_DEVICES=N splits one card into virtual ones, described as `(dev p0/v1)`.
        if "GGML_CUDA_DEVICES" in base_env and any("/v" in d.description for d in cuda):
            env_set["GGML_CUDA_DEVICES"] = base_env["GGML_CUDA_DEVICES"]
    # CPU RPC servers and the engine take turns on the same cores. One that spins while it waits for its threads takes
    # them from the one whose turn it is: measured on two busy cores, 0.5 tokens a second against 30.
    if any(d.device.shares_host for d in plan.devices) and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & base_env.keys():
        env_set["OMP_WAIT_POLICY"] = "passive"
    env = {k: v for k, v in base_env.items() if not _SCRUB.match(k)}
    return env | env_set, env_set


def parse_back(argv: tuple[str, ...]) -> dict[str, object]:
    """What a command line of ours says, by the keys of SPELLINGS, SWITCHES and SAMPLING; numbers are numbers.

    `devices`, `rpc`, `tensor_split` and `numa_policy` (numactl's words) are tuples.
    `rules` is the `-ot` value as (pattern, buffer type) pairs.
    The last value wins, as in the engine. Words of `extra_args` that we do not know are under `extra`.
    """
    by_word = {s: (k, True) for table in (SPELLINGS, SAMPLING) for k, names in table.items() for s in names}
    by_word |= {s: (k, False) for k, names in SWITCHES.items() for s in names}
    policy, own = numa.split_policy(argv)
    out: dict[str, object] = {"engine": own[0]}
    if policy:
        out["numa_policy"] = policy[1:]
    extra: list[str] = []
    words = iter(own[1:])
    for word in words:
        key, takes_value = by_word.get(word, ("", False))
        if not key:
            extra.append(word)
        elif takes_value:
            out[key] = _value(key, next(words, ""))
        else:
            out[key] = True
    if "override_tensor" in out:
        pieces = str(out["override_tensor"]).split(",")
        out["rules"] = tuple((p.partition("=")[0], p.partition("=")[2]) for p in pieces)
    if extra:
        out["extra"] = tuple(extra)
    return out


def planned_split(argv: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(devices, slots of each) as the command line gives them; both empty when everything is on the host."""
    said = parse_back(argv)
    devices, split = said.get("devices", ()), said.get("tensor_split", ())
    if not isinstance(devices, tuple) or not isinstance(split, tuple) or devices == ("none",):
        return (), ()
    return devices, split


_LISTS = frozenset({"rpc", "devices"})
_INTEGERS = frozenset({
    "n_ctx_total", "n_parallel", "n_gpu_layers", "threads", "n_batch", "n_ubatch", "cache_ram", "checkpoints",
    "port", "verbosity", "draft_n_max", "draft_n_gpu_layers", "reasoning_budget",
})  # fmt: skip


def _value(key: str, text: str) -> object:
    if key in _LISTS:
        return tuple(text.split(","))
    if key == "tensor_split":
        return tuple(int(part) for part in text.split(","))
    if key in _INTEGERS:
        return int(text)
    return float(text) if key in SAMPLING else text


def _assemble(
    plan: Plan, *, engine: Engine | None, host: str, port: int, alias: str, slug: Slug | None, mmproj: str | None
) -> _Line:
    s = plan.settings
    unresolved = [k for k in ("n_ctx_per_stream", "threads", "cache_ram_bytes", "checkpoints") if getattr(s, k) is None]
    if unresolved:
        msg = f"the plan of {plan.target} is not resolved: {', '.join(unresolved)}"
        raise ValueError(msg)
    line = _Line(engine, [*numa.prefix(plan), engine.path if engine else "llama-server"])
    # Before -dev and -ot: the names of RPC devices exist only once --rpc was read.
    endpoints = tuple(dict.fromkeys(d.device.endpoint for d in plan.devices if d.device.endpoint))
    if endpoints:
        line.need("rpc", ",".join(endpoints))
    line.need("model", plan.model.path)
    line.need("n_ctx_total", str(plan.n_ctx_total))
    line.need("n_parallel", str(s.n_parallel))
    if s.kv_unified:
        line.need("kv_unified")
    else:
        line.want(SWITCHES["kv_separate"], "an engine without it keeps streams apart")
    if plan.devices:
        line.need("n_gpu_layers", "999")
        # Always said: a card that the plan left out, or a second backend, would take its share of -ts.
        owning = [(d.device.name, n) for d, n in zip(plan.devices, plan.tensor_split, strict=True) if n]
        line.need("devices", ",".join(name for name, _ in owning))  # one that only drafts is on -devd alone
        line.need("split_mode", "layer")
        line.need("tensor_split", ",".join(str(n) for _, n in owning))
    else:
        line.need("n_gpu_layers", "0")
        line.need("devices", "none")
    line.need("threads", str(s.threads))
    line.need("n_batch", str(s.n_batch))
    line.need("n_ubatch", str(s.n_ubatch))
    line.need("flash_attn", s.flash_attn)
    line.need("type_k", s.type_k)
    line.need("type_v", s.type_v)
    _load_mode(line, s.load_mode)
    _numa(line, plan)
    no_store = "an engine without it has no such store in host memory"
    line.want(SPELLINGS["cache_ram"], no_store, str(round((s.cache_ram_bytes or 0) / MIB)))
    line.want(SPELLINGS["checkpoints"], no_store, str(s.checkpoints))
    line.need("host", host)
    line.need("port", str(port))
    line.need("alias", alias)
    line.want(SPELLINGS["fit"], "an engine without it changes nothing by itself", "off")
    line.want(SPELLINGS["verbosity"], "an engine without it prints its buffers anyway", "4")
    if plan.override_tensor:
        line.need("override_tensor", plan.override_tensor)
    _drafter(line, plan)
    _slug_flags(line, slug, mmproj)
    return line


def _numa(line: _Line, plan: Plan) -> None:
    asked, nodes = plan.settings.numa, plan.host.numa
    # On one node the engine's own words are passed on, and ours have nothing to place.
    mode = nodes.engine_mode if nodes is not None else asked if asked in numa.ENGINE_MODES else None
    if mode is not None and mode == asked:
        line.need("numa", mode)
    elif mode is not None:
        line.want(SPELLINGS["numa"], "threads inherit the cores that numactl leaves them", mode)


def _load_mode(line: _Line, mode: str) -> None:
    if line.spell(SPELLINGS["load_mode"]):
        line.need("load_mode", mode)
        return
    for switch in _OLD_LOAD_MODES[mode]:
        line.need(switch)


def _drafter(line: _Line, plan: Plan) -> None:
    """Nothing at all when drafting is off: a depth of 0 still loads the draft model and runs it."""
    s = plan.settings
    if not s.drafter_type or s.drafter_type == "none":
        return
    is_model = s.drafter_type.startswith("draft-")
    on_target = s.drafter_type == "draft-mtp"  # lives in the target's own file
    if is_model and (s.draft_n_max <= 0 or (plan.drafter_path is None and not on_target)):
        return
    if plan.drafter_path and is_model:
        line.need("drafter", plan.drafter_path)
    line.need("spec_type", s.drafter_type)
    if is_model:
        line.need("draft_n_max", str(s.draft_n_max))
    if not plan.devices or on_target:
        return
    if s.drafter_device is not None:
        named = next((d.device.name for d in plan.devices if d.rig_name == s.drafter_device), "none")
        line.need("draft_devices", named)
    if s.drafter_layers is not None:
        line.need("draft_n_gpu_layers", str(s.drafter_layers))
    if s.drafter_experts == "host":
        line.need("draft_override_tensor", f"{CATCH_ALL.pattern}={CATCH_ALL.buffer_type}")


def _slug_flags(line: _Line, slug: Slug | None, mmproj: str | None) -> None:
    line.want(SWITCHES["metrics"], "counters are not served")
    if mmproj:
        line.need("mmproj", mmproj)
    if slug is None:
        return
    for name, number in slug.sampling.items():
        text = str(int(number)) if name in _INTEGER_SAMPLING else f"{float(number):g}"
        line.want(SAMPLING.get(name, ("--" + name.replace("_", "-"),)), "clients may still send it", text)
    # A reasoning switch changes the template; a budget of 0 only cuts the thought off.
    reason = "the template decides"
    if slug.thinking is False and not line.want(SPELLINGS["reasoning"], reason, "off"):
        line.want(SPELLINGS["reasoning_budget"], reason, "0")
    if slug.chat_template:
        if PurePath(slug.chat_template).suffix in (".jinja", ".j2", ".txt") or "/" in slug.chat_template:
            line.need("chat_template_file", _beside(slug, slug.chat_template))
        else:
            line.need("chat_template", slug.chat_template)
    if slug.api_key_file:
        line.need("api_key_file", _beside(slug, slug.api_key_file))
    line.argv += slug.extra_args


def _check_extra_args(slug: Slug) -> None:
    """The engine takes the last value, and extra arguments come last: one of the plan's own flags would win over it."""
    found = fights(slug.extra_args, lambda key: value_of(slug, key))
    problems = [f"{slug.path}: extra_args[{at}]: {problem}" for at, problem in found]
    if problems:
        raise SlugInvalid(
            "slug-invalid",
            f"extra_args of {slug.name} would undo the plan",
            context="\n".join(problems),
            fix=f"${{EDITOR:-vi}} {shlex.quote(slug.path)}     # remove these words",
        )


def _beside(slug: Slug, path: str) -> str:
    """A path of a slug: `~` is the home folder, a relative one starts at the slug's own folder."""
    return str(Path(slug.path).parent / Path(path).expanduser())
