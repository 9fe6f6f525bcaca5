"""Bytes of one device for a range of slots: every term of the inequality in docs/planner.md, priced once.

The search in `place` asks for thousands of ranges, and the finished plan shows the very same terms: one function for
both, so that what was chosen is what is printed. The tree of the design names no such file; without it `place` and
`make_plan` would each hold half of the sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from launcher.planner import compute, drafter, kv, pack
from launcher.planner.shape import ModelShape
from launcher.structs import DEVICE_TERMS, Device, MeasuredCompute, Settings, Source
from launcher.units import GIB, MIB

# A CUDA process holds 107 to 680 MiB a card beyond its buffers (527 on an H200, 250 and 615 on two RTX 3090): when
# this rig has not been measured, more than every plain card seen.
CUDA_CONTEXT_BYTES = 620 * MIB
# 556 MiB free after load died at 90K of prefill on a 24 GB card, 896 MiB survived 188K: leave more than either.
MARGIN_BYTES = GIB


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that stays the same while the search moves. Devices are in `-ts` order.

    fixed_layers  device name -> resident layers, when a person fixed them; None: the search chooses
    draft_apart   the drafter lies on a device that owns no slot of the target, so none of these carries it; the
                  backend of that device, empty: no such device
    memo          what was priced already; shared by the device subsets of one search
    """

    shape: ModelShape
    draft: ModelShape | None
    devices: tuple[Device, ...]
    settings: Settings
    projector_bytes: int = 0
    measured: MeasuredCompute | None = None
    fixed_layers: Mapping[str, frozenset[int]] | None = None
    draft_apart: str = ""
    memo: dict[tuple[object, ...], object] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def n_rs(self) -> int:
        """Rolled-back copies of the target's states."""
        return kv.rollback_copies(self.shape, self.settings)

    @cached_property
    def kv_bytes(self) -> tuple[int, ...]:
        """Main-context cache of each layer."""
        return tuple(kv.layer_bytes(self.shape, layer, self.settings, self.n_rs) for layer in self.shape.layers)

    @cached_property
    def mtp_bytes(self) -> tuple[int, ...]:
        """Cache that an MTP context adds, per layer."""
        return tuple(kv.mtp_layer_bytes(self.shape, layer, self.settings) for layer in self.shape.layers)

    @cached_property
    def draft_kv_bytes(self) -> tuple[int, ...]:
        """The drafter's cache per draft layer: same context, its own arch, f16 unless said otherwise."""
        if self.draft is None:
            return ()
        s = self.settings
        own = Settings(
            n_ctx_per_stream=s.n_ctx_per_stream,
            n_parallel=s.n_parallel,
            kv_unified=s.kv_unified,
            n_batch=s.n_batch,
            n_ubatch=s.n_ubatch,
        )
        return tuple(kv.layer_bytes(self.draft, layer, own) for layer in self.draft.layers)

    @cached_property
    def first(self) -> int:
        """The device that computes every offloaded expert: the first that offloads at all (RPC devices never do)."""
        return next((k for k, d in enumerate(self.devices) if d.backend not in compute.NO_OFFLOAD), 0)

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """Loaded blocks with routed experts: the candidates."""
        return tuple(layer.index for layer in self.shape.layers if layer.loaded and layer.bundle.file)

    @cached_property
    def largest_expert_bytes(self) -> int:
        """The largest single expert tensor: what op-offload copies to the first device."""
        return max((layer.largest_expert_bytes for layer in self.shape.layers), default=0)

    def prefix(self, backend: str) -> Sequence[tuple[int, int]]:
        """Running sums (dense, kv) over layers: entry i covers layers < i."""
        return self._prefixes[backend]

    @cached_property
    def _prefixes(self) -> dict[str, list[tuple[int, int]]]:
        result = {}
        for backend in {d.backend for d in self.devices}:
            sums = [(0, 0)]
            for layer in self.shape.layers:
                dense, cache = sums[-1]
                sums.append((dense + layer.dense.on(backend), cache + self.kv_bytes[layer.index]))
            result[backend] = sums
        return result


def margin_bytes(device: Device, s: Settings) -> int:
    """Room that must stay free on a device: max(1 GiB, 1 % of it), or what a person said.

    A device that is this host's own memory (a CPU RPC server) has no pool that grows with depth: no margin.
    """
    if s.margin_bytes is not None:
        return s.margin_bytes
    if device.shares_host:
        return 0
    return max(MARGIN_BYTES, (device.total_bytes or 0) // 100)


def context_bytes(device: Device) -> tuple[int, Source]:
    """What a process holds on a device beyond its buffers, and where the number came from."""
    if device.context_bytes is not None:
        return device.context_bytes, Source.MEASURED
    return (0 if device.backend == "rpc" else CUDA_CONTEXT_BYTES), Source.FORMULA


def terms(p: Problem, k: int, start: int, end: int, resident: Sequence[int], *, host_anywhere: bool) -> dict[str, int]:
    """Every term of DEVICE_TERMS for device `k` that owns slots [start, end) with these resident bundles.

    host_anywhere  whether any bundle of the whole model stays in host memory (op-offload then copies to device 0)
    """
    nextn = {layer.index for layer in p.shape.layers[p.shape.n_layer - p.shape.n_nextn :] if layer.bundle.file}
    here = nextn & set(range(start, end))
    # the search does not know yet which blocks it takes: it priced the larger of both
    beside = here <= set(resident) if here else None if host_anywhere else True
    return fixed_terms(p, k, start, end, nextn_resident=beside) | {
        "experts": sum(p.shape.layers[i].bundle.on(p.devices[k].backend) for i in resident),
        "compute": compute_bytes(p, k, start, end, len(resident), host_anywhere),
    }


def fixed_terms(p: Problem, k: int, start: int, end: int, *, nextn_resident: bool | None = None) -> dict[str, int]:
    """Terms that do not depend on which bundles are resident; all names of DEVICE_TERMS, in its order.

    nextn_resident  whether the experts of NextN blocks lie with them, None while that is open: the larger buffer
    """
    shape, device = p.shape, p.devices[k]
    backend, n_layer = device.backend, shape.n_layer
    last = min(end, n_layer)
    sums = p.prefix(backend)
    return {
        "dense": sums[last][0] - sums[start][0] + (shape.per_device.on(backend) if last > start else 0),
        "experts": 0,
        "output": shape.output.on(backend) if end == n_layer + 1 else 0,
        "kv": sums[last][1] - sums[start][1],
        "compute": 0,
        "drafter": _drafter(p, k, start, end, nextn_resident),
        "projector": p.projector_bytes if k == p.first else 0,
        "context": context_bytes(device)[0],
        "margin": margin_bytes(device, p.settings),
    }


def sources(p: Problem, k: int) -> dict[str, Source]:
    """Where each term of device `k` came from."""
    name = p.devices[k].name
    source = dict.fromkeys(DEVICE_TERMS, Source.FORMULA)
    source["context"] = context_bytes(p.devices[k])[1]
    if p.settings.margin_bytes is not None:
        source["margin"] = Source.DECLARED
    tapped = k == len(p.devices) - 1 and p.settings.drafter_type in compute.EXTRACTING
    if p.measured and name in p.measured.compute_bytes and not tapped:
        source["compute"] = p.measured.source
    if p.measured and p.measured.draft_bytes and name in p.measured.draft_bytes:
        source["drafter"] = p.measured.source
    return source


def table(p: Problem, backend: str) -> pack.BundleTable:
    """Where the bundles of each size lie, in that backend's bytes."""
    key = ("table", backend)
    if key not in p.memo:
        p.memo[key] = pack.bundle_table([layer.bundle.on(backend) for layer in p.shape.layers])
    found = p.memo[key]
    assert isinstance(found, pack.BundleTable)
    return found


def sums(p: Problem, k: int) -> pack.Sums | None:
    """Every sum of bundles that device `k` could hold at all."""
    key = ("sums", p.devices[k].name)
    if key not in p.memo:
        p.memo[key] = pack.sums(table(p, p.devices[k].backend), p.devices[k].free_bytes or 0)
    found = p.memo[key]
    assert found is None or isinstance(found, pack.Sums)
    return found


def compute_bytes(p: Problem, k: int, start: int, end: int, n_resident: int, host_anywhere: bool) -> int:
    """The compute buffer of a range with so many resident bundles: dry run where it speaks of it, else the bound."""
    own_output = end == p.shape.n_layer + 1
    measured = p.measured.compute_bytes.get(p.devices[k].name) if p.measured else None
    # A drafter that taps hidden states makes the engine reserve again after any dry run, on the output's device.
    if measured is not None and not (own_output and p.settings.drafter_type in compute.EXTRACTING):
        return measured
    n_moe = bisect_left(p.moe_layers, end) - bisect_left(p.moe_layers, start)
    slots = range(start, end)
    key = (
        "compute", p.devices[k].backend, compute.slot_class(p.shape, slots), k == p.first, own_output, len(p.devices),
        n_resident > 0, n_resident < n_moe, host_anywhere,
    )  # fmt: skip
    if key not in p.memo:
        p.memo[key] = compute.device_compute_bytes(
            p.shape,
            p.settings,
            backend=p.devices[k].backend,
            slots=slots,
            first=k == p.first,
            output=own_output,
            n_devices=len(p.devices),
            resident_here=n_resident > 0,
            host_here=n_resident < n_moe,
            host_anywhere=host_anywhere,
            override=bool(p.moe_layers),
            largest_host_expert_bytes=p.largest_expert_bytes,
        )
    bound = p.memo[key]
    assert isinstance(bound, int)
    return max(bound, measured or 0)


def _drafter(p: Problem, k: int, start: int, end: int, nextn_resident: bool | None) -> int:
    name, drafts = p.devices[k].name, p.draft is not None or any(p.mtp_bytes)
    if drafts and p.measured and p.measured.draft_bytes and name in p.measured.draft_bytes:
        return p.measured.draft_bytes[name]
    return sum(drafter.parts(p, k, start, end, nextn_resident))
