"""The runs: shape, limits, settings and arms of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_ARMS = ("ours", "fit", "ncmoe", "cpumoe", "stock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row of the matrix.

    spec, draft    replica specs of tests/replicas/specs, without .yaml; n_layer cuts the target to its first layers
    limits_gib     what each physical card has left, the rest is held
    virtual        virtual devices that one card is split into (GGML_CUDA_DEVICES), 0: none
    given          overrides of the plan, as on the command line
    arms           who is measured, in turn; those in `once` only in the first round
    prefill        lengths of the prompts that are timed
    """

    name: str
    title: str
    spec: str
    draft: str | None = None
    n_layer: int | None = None
    limits_gib: tuple[float, ...]
    virtual: int = 0
    given: Mapping[str, Any] = field(default_factory=dict)
    arms: tuple[str, ...] = ("ours",)
    once: tuple[str, ...] = ("cpumoe", "stock")
    ladder: bool = True
    prefill: tuple[int, ...] = (4096, 30000)

    @property
    def n_cards(self) -> int:
        """Physical cards that it needs."""
        return len(self.limits_gib)


_CARD = {"margin": "1024MiB"}  # of a 24 GiB card; 1 % of the whole card would be more than the small one keeps free
_SHAPES = [
    Run(
        name="qwen3-12",
        title="Qwen3-30B-A3B Q4_K_M, one card of 12 GiB, against all others",
        spec="qwen3-30b-a3b-Q4_K_M",
        limits_gib=(12,),
        given={**_CARD, "ctx": "32k", "ubatch": 2048, "batch": 2048},
        arms=ALL_ARMS,
    ),
    Run(
        name="gptoss-24",
        title="gpt-oss-120b, one card of 24 GiB, 131,072 tokens, against --fit",
        spec="gpt-oss-120b-MXFP4",
        limits_gib=(24,),
        given={**_CARD, "ctx": "128k", "ubatch": 2048, "batch": 4096},
        arms=("ours", "fit"),
    ),
    Run(
        name="gptoss-24-q8",
        title="gpt-oss-120b, one card of 24 GiB, q8_0 KV",
        spec="gpt-oss-120b-MXFP4",
        limits_gib=(24,),
        given={**_CARD, "ctx": "128k", "ubatch": 2048, "batch": 4096, "kv": "q8_0"},
    ),
    Run(
        name="qwen3-two",
        title="Qwen3-30B-A3B, two physical cards of 8 and 5 GiB",
        spec="qwen3-30b-a3b-Q4_K_M",
        limits_gib=(8, 5),
        given={**_CARD, "ctx": "64k", "ubatch": 2048, "batch": 2048},
        arms=("ours", "fit"),
    ),
    Run(
        name="gptoss-two",
        title="gpt-oss-120b, two physical cards of 24 and 16 GiB",
        spec="gpt-oss-120b-MXFP4",
        limits_gib=(24, 16),
        given={**_CARD, "ctx": "128k", "ubatch": 2048, "batch": 4096},
        arms=("ours", "fit"),
    ),
    Run(
        name="dspark-virtual",
        title="DeepSeek-V4-Flash cut to 12 layers with its DSpark drafter, two virtual devices of 18 GiB",
        spec="deepseek-v4-flash-UD-Q8_K_XL",
        draft="deepseek-v4-flash-dspark-Q8_0",
        n_layer=12,
        limits_gib=(36,),
        virtual=2,
        given={**_CARD, "ctx": "64k", "ubatch": 2048, "batch": 2048, "draft_max": 5},
    ),
    Run(
        name="dspark-host-experts",
        title="the same with the drafter's routed experts in host memory",
        spec="deepseek-v4-flash-UD-Q8_K_XL",
        draft="deepseek-v4-flash-dspark-Q8_0",
        n_layer=12,
        limits_gib=(36,),
        virtual=2,
        given={
            **_CARD, "ctx": "64k", "ubatch": 2048, "batch": 2048, "draft_max": 5, "drafter_experts": "host",
        },
    ),
    Run(
        name="four-virtual",
        title="Qwen3-30B-A3B, four virtual devices of 6, 4, 3 and 3 GiB",
        spec="qwen3-30b-a3b-Q4_K_M",
        limits_gib=(24,),  # each of four has a quarter
        virtual=4,
        given={**_CARD, "ctx": "32k", "ubatch": 512, "reserve": ["CUDA1=2GiB", "CUDA2=3GiB", "CUDA3=3GiB"]},
    ),
]  # fmt: skip
RUNS = {run.name: run for run in _SHAPES}
