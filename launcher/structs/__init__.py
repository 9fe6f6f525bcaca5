"""Frozen dataclasses that cross rooms, in pipeline order.

    Slug + ModelHeader(s) + Inventory(devices, host, engine) + Settings -> Plan -> RunRecord -> Audit

Bytes are `int` with the suffix `_bytes`; unknown is `None`, never 0; identity of a card is its UUID or PCI id,
of a process `(pid, create_time)`. Nothing here reads or computes more than a sum.
"""

from __future__ import annotations

from launcher.structs.inventory import (
    Device,
    Engine,
    GpuProcess,
    Host,
    Inventory,
    NumaNode,
)
from launcher.structs.model import (
    ModelHeader,
    Scalar,
    ShardInfo,
    TensorInfo,
    Value,
)
from launcher.structs.plan import (
    DEVICE_TERMS,
    HOST_TERMS,
    DevicePlan,
    HostPlan,
    Launch,
    LayerPlan,
    MeasuredCompute,
    ModelSummary,
    NumaOption,
    NumaPlan,
    Plan,
    Range,
    Refusal,
    Rule,
    Settings,
    Source,
    Speed,
    WayOut,
)
from launcher.structs.run import (
    Audit,
    AuditCard,
    AuditRow,
    Gate,
    ProcessId,
    RunEnd,
    RunRecord,
)
from launcher.structs.slug import (
    DrafterRef,
    EngineRef,
    ModelRef,
    PlacementPolicy,
    RpcRef,
    ServeSettings,
    Slug,
    Status,
)

__all__ = [
    "Audit",
    "AuditCard",
    "AuditRow",
    "DEVICE_TERMS",
    "Device",
    "DevicePlan",
    "DrafterRef",
    "Engine",
    "EngineRef",
    "Gate",
    "GpuProcess",
    "HOST_TERMS",
    "Host",
    "HostPlan",
    "Inventory",
    "Launch",
    "LayerPlan",
    "MeasuredCompute",
    "ModelHeader",
    "ModelRef",
    "ModelSummary",
    "NumaNode",
    "NumaOption",
    "NumaPlan",
    "PlacementPolicy",
    "Plan",
    "ProcessId",
    "Range",
    "Refusal",
    "RpcRef",
    "Rule",
    "RunEnd",
    "RunRecord",
    "Scalar",
    "ServeSettings",
    "Settings",
    "ShardInfo",
    "Slug",
    "Source",
    "Speed",
    "Status",
    "TensorInfo",
    "Value",
    "WayOut",
]
