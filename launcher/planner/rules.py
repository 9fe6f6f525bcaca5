"""placement -> one ordered list of `-ot` rules, and `resolve` as its inverse.

How llama.cpp b11434 reads them (`common/arg.cpp: parse_tensor_buffer_overrides`, `src/llama-model-loader.cpp:
create_tensor`): the argument is split at every comma, each piece at its first `=`; `std::regex_search`, unanchored,
against the whole tensor name; the first match wins; a rule that matches nothing is silent. So every number is anchored
on both sides, no pattern holds a comma or `=`, device rules come before the catch-all, and nothing is launched before
the list was resolved against the file's own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from launcher.errors import Refused
from launcher.planner.shape import EXPERT_CLASS
from launcher.structs import ModelHeader, Plan, Rule
from launcher.units import mib

CPU = "CPU"
CATCH_ALL = Rule(pattern=rf"\.{EXPERT_CLASS}", buffer_type=CPU)
_BLOCK = re.compile(rf"^blk\.(\d+)\.{EXPERT_CLASS}")


def build(resident: Sequence[tuple[str, Sequence[int]]], *, any_host: bool) -> tuple[Rule, ...]:
    """Rules for resident layers per buffer type, in device order, the catch-all last.

    With every bundle on a device the device rules stay: dropping the list would turn pipeline copies on.
    """
    rules = [
        Rule(pattern=rf"^blk\.({'|'.join(str(i) for i in sorted(layers))})\.{EXPERT_CLASS}", buffer_type=buffer_type)
        for buffer_type, layers in resident
        if layers
    ]
    return (*rules, CATCH_ALL) if any_host else tuple(rules)


def parse(argument: str) -> tuple[Rule, ...]:
    """The rules of one `-ot` argument, split as the engine splits it. Raises ValueError for a piece without `=`."""
    rules = []
    for piece in argument.split(","):
        pattern, equals, buffer_type = piece.partition("=")
        if not equals or not pattern or not buffer_type:
            msg = f"not a rule: {piece!r} (write PATTERN=BUFFER; the engine splits at every comma)"
            raise ValueError(msg)
        rules.append(Rule(pattern=pattern, buffer_type=buffer_type))
    return tuple(rules)


def resolve(rules: Sequence[Rule], tensor_names: Iterable[str]) -> dict[str, str | None]:
    """Tensor name -> buffer type of the first rule that matches, None where the layer's owner keeps it."""
    compiled = [(re.compile(r.pattern), r.buffer_type) for r in rules]
    return {name: next((b for p, b in compiled if p.search(name)), None) for name in tensor_names}


def check(plan: Plan, header: ModelHeader) -> None:
    """Proves that the plan's rules put every tensor where the plan says. Raises Refused `rules-mismatch`.

    Also that every rule decides at least one tensor, and that the bytes which the CPU rule takes are the bytes that
    the plan calls host-resident.
    """
    names = [t.name for t in header.tensors]
    expected = _expected(plan)
    loaded = {layer.index for layer in plan.layers if layer.loaded}
    wrong: list[str] = []
    host_bytes = 0
    found = resolve(plan.rules, names)
    for t in header.tensors:
        m = _BLOCK.match(t.name)
        block = int(m.group(1)) if m else None
        got = found[t.name]
        if block is None or block not in loaded:
            if got is not None and block is None:
                wrong.append(f"{t.name} goes to {got}, no rule should touch it")
            continue
        want = expected.get(block)
        if got != want:
            wrong.append(f"{t.name} goes to {got or 'its owner'}, planned {want or 'its owner'}")
        elif got == CPU:
            host_bytes += t.size_bytes
    planned = sum(layer.bundle_bytes for layer in plan.layers if layer.bundle_bytes and not layer.resident)
    if plan.rules and not wrong and host_bytes != planned:
        wrong.append(f"the CPU rule takes {mib(host_bytes)} MiB, planned {mib(planned)} MiB")
    if not wrong:
        wrong = [f"{r.pattern}={r.buffer_type} decides no tensor" for r in plan.rules if not _decides(r, plan, names)]
    if wrong:
        raise Refused(
            "rules-mismatch",
            f"the -ot rules do not give the planned placement: {len(wrong)} tensors or rules differ",
            context="\n".join(wrong[:5]),
            fix=f"-ot '{_in_order(plan.rules)}'",
        )


def _in_order(rules: Sequence[Rule]) -> str:
    ordered = sorted(rules, key=lambda r: (r.buffer_type == CPU, r.buffer_type))
    return ",".join(f"{r.pattern}={r.buffer_type}" for r in ordered)


def _decides(rule: Rule, plan: Plan, names: Sequence[str]) -> bool:
    earlier = plan.rules[: plan.rules.index(rule)]
    pattern = re.compile(rule.pattern)
    before = [re.compile(r.pattern) for r in earlier]
    return any(pattern.search(n) and not any(b.search(n) for b in before) for n in names)


def _expected(plan: Plan) -> Mapping[int, str | None]:
    """Block -> buffer type that its experts must resolve to; without rules (host only, dense) nothing resolves."""
    if not plan.rules:
        return {}
    buffers = {d.device.name: d.device.buffer_type for d in plan.devices}
    return {
        layer.index: buffers[layer.device] if layer.resident else CPU
        for layer in plan.layers
        if layer.loaded and layer.bundle_bytes
    }
