"""Small plans, engines and launches for the tests of `serve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.structs import (
    DEVICE_TERMS,
    HOST_TERMS,
    Device,
    DevicePlan,
    Engine,
    Host,
    HostPlan,
    Inventory,
    Launch,
    LayerPlan,
    ModelRef,
    ModelSummary,
    Plan,
    Range,
    Rule,
    Settings,
    Slug,
    Source,
    Speed,
    Status,
)
from launcher.units import GIB, MIB

FAKE_SERVER = str(Path(__file__).parent / "fake_server.py")
# The long spellings of b11434's --help that we use, and the short ones beside them.
_WORDS = (
    "--rpc -m --model -c --ctx-size -np --parallel -ngl --gpu-layers --n-gpu-layers -dev --device -sm --split-mode "
    "-ts --tensor-split -t --threads -b --batch-size -ub --ubatch-size -fa --flash-attn -ctk --cache-type-k -ctv "
    "--cache-type-v -lm --load-mode --numa -cram --cache-ram -ctxcp --ctx-checkpoints --swa-checkpoints --host --port "
    "-a --alias -fit --fit -lv --verbosity -ot --override-tensor -md --spec-draft-model --model-draft --spec-type "
    "--spec-draft-n-max -mm --mmproj -rea --reasoning --reasoning-budget --chat-template --chat-template-file "
    "--api-key-file -kvu --kv-unified -no-kvu --no-kv-unified --metrics --log-jsonl --temp --temperature --top-p "
    "--top-k --min-p"
)
B11434 = frozenset(_WORDS.split())
# Behaviour of tests/fake_server.py: an engine that plays it must name them in its --help too.
FAKE_FLAGS = frozenset({
    "--fail", "--hang", "--load-s", "--no-answer", "--thinks", "--exit-after", "--print-env", "--die-at", "--exit-code",
    "--die-by", "--deaf",
})  # fmt: skip


def card(name: str = "CUDA0", **changes: Any) -> Device:
    found = Device(
        name=name,
        buffer_type=name,
        backend="cuda",
        description="NVIDIA GeForce RTX 3090",
        total_bytes=24576 * MIB,
        free_bytes=24125 * MIB,
        uuid=f"GPU-{name[-1] * 8}",
    )
    return replace(found, **changes)


def rpc_device(index: int, port: int) -> Device:
    return Device(
        name=f"RPC{index}",
        buffer_type=f"RPC0[127.0.0.1:{port}]",
        backend="rpc",
        description="CPU",
        total_bytes=4 * GIB,
        free_bytes=4 * GIB,
        endpoint=f"127.0.0.1:{port}",
        shares_host=True,
    )


def settings(**changes: Any) -> Settings:
    found = Settings(n_ctx_per_stream=2048, threads=2, cache_ram_bytes=0, checkpoints=1)
    return replace(found, **changes)


def device_plan(device: Device, terms: Mapping[str, int] | None = None, layers: tuple[int, ...] = (0, 1)) -> DevicePlan:
    full = dict.fromkeys(DEVICE_TERMS, 0) | (terms or {"dense": 1000 * MIB, "margin": 1024 * MIB})
    return DevicePlan(
        device=device,
        rig_name=device.name,
        layers=layers,
        owns_output=False,
        resident_layers=layers[:1],
        terms=full,
        source=dict.fromkeys(DEVICE_TERMS, Source.FORMULA),
    )


def plan(*devices: Device | DevicePlan, model: str = "/models/m.gguf", **changes: Any) -> Plan:
    shares = tuple(d if isinstance(d, DevicePlan) else device_plan(d) for d in devices)
    host_terms = dict.fromkeys(HOST_TERMS, 0) | {"experts": 10 * GIB, "overhead": 1 * GIB}
    rules = tuple(Rule(pattern=r"^blk\.(0)\.ffn_x_exps", buffer_type=d.device.buffer_type) for d in shares)
    found = Plan(
        target="demo/smol-moe",
        model=ModelSummary(
            path=model,
            arch="llama",
            shards=1,
            file_bytes=8 * MIB,
            n_layer=4,
            n_expert=8,
            n_expert_used=2,
            n_ctx_train=2048,
        ),
        settings=settings(),
        drafter_path=None,
        devices=shares,
        layers=tuple(
            LayerPlan(index=i, device="CPU", resident=False, loaded=True, dense_bytes=1, bundle_bytes=1, kv_bytes=1)
            for i in range(4)
        ),
        host=HostPlan(
            terms=host_terms, source=dict.fromkeys(HOST_TERMS, Source.FORMULA), available_bytes=32 * GIB, layers=()
        ),
        tensor_split=tuple([3, 2] if len(shares) == 2 else [5] * len(shares)),
        rules=(*rules, Rule(pattern=r"\.ffn_x_exps", buffer_type="CPU")) if shares else (),
        speed=Speed(decode_tps=Range(low=None, high=None), prefill_tps=Range(low=None, high=None), limited_by=""),
    )
    return replace(found, **changes)


def engine(path: str = "/opt/llama-server", flags: frozenset[str] = B11434) -> Engine:
    return Engine(
        path=path,
        version="0.6.0-dev (build 0, commit unknown)",
        digest="0" * 64,
        found_by="--engine",
        flags=flags,
        spec_types=frozenset({"none", "draft-mtp", "draft-dspark", "ngram-simple"}),
    )


def slug(**changes: Any) -> Slug:
    found = Slug(
        name="demo/smol-moe",
        path="/slugs/demo/smol-moe.yaml",
        title="demo",
        status=Status.PRODUCTION,
        model=ModelRef(file="m.gguf", repo="org/repo"),
    )
    return replace(found, **changes)


def inventory(*devices: Device, **changes: Any) -> Inventory:
    host = Host(total_bytes=64 * GIB, available_bytes=32 * GIB, limited_by="MemAvailable", cores=2)
    return Inventory(devices=devices, host=replace(host, **changes))


def fake_launch(port: int, *words: str, alias: str = "fake", host: str = "127.0.0.1", **changes: Any) -> Launch:
    """The fake server as a launch."""
    argv = (sys.executable, FAKE_SERVER, "--host", host, "--port", str(port), "--alias", alias, *words)
    env = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")}
    return Launch(plan=plan(), argv=argv, env=env | changes, env_set=changes, host=host, port=port, alias=alias)
