"""What a llama-server said while it loaded: buffer sizes, layer owners. Pure parsing of its `-lv 4` (or 5) log.

Line shapes of llama.cpp b11434: src/llama-model.cpp `load_tensors`, src/llama-context.cpp `sched_reserve`,
src/llama-kv-cache*.cpp, src/llama-memory-recurrent.cpp. Text and `--log-jsonl` logs are both understood.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.units import MIB

_SIZE = re.compile(
    r"(?P<by>[\w~]+): +(?P<name>\S+) +(?P<kind>model|output|KV|RS|DSV4 \w+ state|compute)"
    r" buffer size = +(?P<mib>[\d.]+) MiB"
)
_LAYER = re.compile(r"load_tensors: layer +(\d+) assigned to device ([^,]+),")
_SLOTS = re.compile(r"load_model: initializing, n_slots = (\d+), n_ctx_slot = (\d+)")
_OFFLOADED = re.compile(r"load_tensors: offloaded (\d+)/(\d+) layers")
_NODES = re.compile(r"sched_reserve: graph\b.*?nodes += (\d+)")
_FIT_BEGINS = "fitting params to device memory"
_FIT_ENDS = "fitting params to free memory took"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLog:
    """Buffers of one load by the engine's buffer name (`CUDA0`, `CUDA_Host`, `CPU`, `RPC0[host:port]`), in bytes.

    Sizes come from lines that print hundredths of a MiB. kv_bytes holds every cache and recurrent state.
    draft_* are the draft model's; an MTP drafter shares the model's weights, so its draft_model_bytes is empty.
    layer_devices  (layer, device name), the output as the last one; only at `-lv 5`
    overrides      tensors that an override moved; only at `-lv 5`
    loaded         the engine reached `model loaded`
    """

    model_bytes: Mapping[str, int] = field(default_factory=dict)
    kv_bytes: Mapping[str, int] = field(default_factory=dict)
    compute_bytes: Mapping[str, int] = field(default_factory=dict)
    output_bytes: Mapping[str, int] = field(default_factory=dict)
    draft_model_bytes: Mapping[str, int] = field(default_factory=dict)
    draft_kv_bytes: Mapping[str, int] = field(default_factory=dict)
    draft_compute_bytes: Mapping[str, int] = field(default_factory=dict)
    draft_output_bytes: Mapping[str, int] = field(default_factory=dict)
    layer_devices: tuple[tuple[int, str], ...] = ()
    overrides: int = 0
    offloaded: tuple[int, int] | None = None
    n_slots: int | None = None
    n_ctx_slot: int | None = None
    pipeline: bool = False
    speculative: bool = False
    loaded: bool = False


@dataclass(slots=True)
class _Context:
    kv: dict[str, int] = field(default_factory=dict)
    compute: dict[str, int] = field(default_factory=dict)
    output: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)  # compute of its last but one reservation
    nodes: int = 0  # of its graph, once it was reserved
    pipeline: bool = False


@dataclass(slots=True)
class _Model:
    weights: dict[str, int] = field(default_factory=dict)
    layers: list[tuple[int, str]] = field(default_factory=list)
    overrides: int = 0
    offloaded: tuple[int, int] | None = None
    contexts: list[_Context] = field(default_factory=list)

    def context(self) -> _Context:
        if not self.contexts:
            self.contexts.append(_Context())
        return self.contexts[-1]


def parse_load_log(text: str) -> LoadLog:
    """The last load in a log. Trial loads of the engine's own fit (their weights and caches read 0.00) are left out.

    The first model of a load is the target, the second the drafter; a second context on the first is an MTP drafter.
    """
    models: list[_Model] = []
    slots: tuple[int, int] | None = None
    fitting = loaded = speculative = False
    for raw in text.splitlines():
        line = _message(raw)
        if "load_model: loading model '" in line:
            models, slots, fitting, loaded, speculative = [], None, False, False, False
        elif _FIT_BEGINS in line:
            fitting = True
        elif _FIT_ENDS in line:
            fitting = False
        elif line.endswith("llama_server: model loaded"):
            loaded = True
        elif "speculative decoding context initialized" in line:
            speculative = True
        elif match := _SLOTS.search(line):
            slots = int(match[1]), int(match[2])
        elif not fitting:
            _feed(models, line)
    main = models[0] if models else _Model()
    first = main.contexts[0] if main.contexts else _Context()
    draft = models[1] if len(models) > 1 else _Model(contexts=main.contexts[1:2])
    second = draft.contexts[0] if draft.contexts else _Context()
    return LoadLog(
        model_bytes=main.weights,
        kv_bytes=first.kv,
        compute_bytes=first.compute,
        output_bytes=first.output,
        draft_model_bytes=draft.weights,
        draft_kv_bytes=second.kv,
        draft_compute_bytes=second.compute,
        draft_output_bytes=second.output,
        layer_devices=tuple(main.layers),
        overrides=main.overrides,
        offloaded=main.offloaded,
        n_slots=slots[0] if slots else None,
        n_ctx_slot=slots[1] if slots else None,
        pipeline=first.pipeline,
        speculative=speculative,
        loaded=loaded,
    )


def _message(raw: str) -> str:
    """The text of one line, out of its JSON where the log is JSON lines."""
    if raw.startswith('{"type":"log"'):
        try:
            event = json.loads(raw)
        except ValueError:  # a line cut in the middle
            return raw
        return str(event.get("msg", "")).rstrip()
    return raw.rstrip()


def _reserved(models: list[_Model], nodes: int) -> None:
    """The buffers just listed replace those of the context that they belong to.

    A context may reserve again, and the target does so after the drafter's was made, with the first tokens that are
    drafted: a graph that nearly has the nodes of one seen before is that context's.
    """
    latest = models[-1].context()
    known = [c for model in models for c in model.contexts if c.nodes]
    if latest.nodes and known:
        owner = min(known, key=lambda c: abs(c.nodes - nodes) / max(c.nodes, nodes))
        if owner is not latest:
            # the sizes went to the latest context; what that one really holds is what it held before
            owner.compute, latest.compute = latest.compute, latest.before
            return
    latest.nodes = nodes


def _feed(models: list[_Model], line: str) -> None:
    if "load_tensors: loading model tensors" in line:
        models.append(_Model())
        return
    if not models:
        return
    model = models[-1]
    if "llama_context: constructing llama_context" in line:
        model.contexts.append(_Context())
    elif "sched_reserve: reserving" in line:
        context = model.context()
        context.before, context.compute = context.compute, {}
    elif match := _NODES.search(line):
        _reserved(models, int(match[1]))
    elif "llama_context: pipeline parallelism enabled" in line:
        model.context().pipeline = True
    elif match := _SIZE.search(line):
        _add(model, match)
    elif match := _LAYER.search(line):
        model.layers.append((int(match[1]), match[2]))
    elif "buffer type overridden to" in line:
        model.overrides += 1
    elif match := _OFFLOADED.search(line):
        model.offloaded = int(match[1]), int(match[2])


def _add(model: _Model, match: re.Match[str]) -> None:
    by, name, kind = match["by"], match["name"], match["kind"]
    if kind == "model":
        table = model.weights if by == "load_tensors" else None
    elif kind == "compute":
        table = model.context().compute if by == "sched_reserve" else None
    elif kind == "output":
        table = model.context().output
    else:
        table = model.context().kv
    if table is not None:
        table[name] = table.get(name, 0) + round(float(match["mib"]) * MIB)
