"""What one value of a slug may be: word lists, the flags that `extra_args` may not hold, and converters.

Apart from `slug.py`, which knows the keys: this half follows the engine and changes with it. A converter takes the
text of a scalar and raises ValueError with what it expected.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from launcher import units
from launcher.facts.yaml_reader import integer, one_of
from launcher.structs import Slug, Status

LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
NUMA_MODES = ("auto", "off", "bind", "interleave", "distribute", "isolate", "numactl")
# The engine's --spec-type values that read a draft model (b11434 `common/speculative.cpp`); the ngram-* ones read none.
DRAFTER_TYPES = ("draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")
_NGRAM_TYPES = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
# Each is a llama-server flag with `-` for `_`.
SAMPLING_KEYS = (
    "temperature", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold",
    "repeat_last_n", "repeat_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base",
)  # fmt: skip
WHOLE_SAMPLING_KEYS = ("top_k", "repeat_last_n")
MOST_RESTARTS = 5
_MOST_TOKENS = 2**31 - 1  # the engine keeps positions as int32

# llama-server flags (b11434 `common/arg.cpp`, removed spellings included) that the launcher writes itself or whose
# effect the plan could not see, by what to use instead.
_OWNED = {
    "model": "-m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo -hff --hf-file -hft --hf-token",
    "mmproj": "-mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload "
    "--no-mmproj-offload",
    "drafter": "-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf -ctkd "
    "--cache-type-k-draft --spec-draft-type-k -ctvd --cache-type-v-draft --spec-draft-type-v",
    "drafter.device": "-devd --device-draft --spec-draft-device",
    "drafter.layers": "-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl",
    "drafter.experts": "-otd --override-tensor-draft --spec-draft-override-tensor -cmoed --cpu-moe-draft "
    "--spec-draft-cpu-moe -ncmoed --n-cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe",
    "drafter.type": "--spec-type --spec-default --mtp --dflash --eagle3",
    "drafter.n_max": "--spec-draft-n-max --draft --draft-n --draft-max",
    "serve.n_ctx": "-c --ctx-size",
    "serve.n_parallel": "-np --parallel",
    "serve.kv_unified": "-kvu --kv-unified -no-kvu --no-kv-unified --kv-unified-per-slot",
    "serve.n_batch": "-b --batch-size",
    "serve.n_ubatch": "-ub --ubatch-size",
    "serve.flash_attn": "-fa --flash-attn",
    "serve.type_k": "-ctk --cache-type-k",
    "serve.type_v": "-ctv --cache-type-v",
    "serve.threads": "-t --threads",
    "serve.load_mode": "-lm --load-mode --mmap --no-mmap --mlock -dio --direct-io -ndio --no-direct-io",
    "serve.numa": "--numa",
    "serve.cache_ram": "-cram --cache-ram",
    "serve.checkpoints": "-ctxcp --ctx-checkpoints --swa-checkpoints",
    "serve.host": "--host",
    "serve.port": "--port --reuse-port",
    "serve.alias": "-a --alias",
    "placement.residency": "-ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn -ngl "
    "--gpu-layers --n-gpu-layers",
    "placement.margin": "-fit --fit -fitt --fit-target -fitc --fit-ctx -fitp --fit-print",
    "placement.order": "-dev --device -ts --tensor-split -sm --split-mode -mg --main-gpu",
    "rpc.hosts": "--rpc",
    "thinking": "-rea --reasoning",
    "chat_template": "--chat-template --chat-template-file",
    "api_key_file": "--api-key --api-key-file",
    "sampling.temperature": "--temp",
    "": "-lv --verbosity --log-verbosity -v --verbose --log-verbose --log-disable --log-file --log-jsonl "
    "--no-log-jsonl --log-colors --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --no-slots "
    "--api-prefix --ssl-key-file --ssl-cert-file --models-dir --models-preset --models-max --swa-full -kvo "
    "--kv-offload -nkvo --no-kv-offload --no-host -lzm --lazy-mode -h --help --usage --version -cl --cache-list "
    "--list-devices --completion-bash",
}
OWNED_FLAGS: Mapping[str, str] = {flag: key for key, flags in _OWNED.items() for flag in flags.split()} | {
    f"--{key.replace('_', '-')}": f"sampling.{key}" for key in SAMPLING_KEYS
}

_SPLIT = "whole expert bundles in host memory need -sm layer, which the plan writes"
# What to say of a flag that people paste from older recipes; b10884 took the load switches out of common/arg.cpp.
INSTEAD: Mapping[str, str] = {
    "--no-mmap": "gone since b10884: serve.load_mode: none is spelled --load-mode none",
    "--mmap": "gone since b10884: serve.load_mode: mmap is spelled --load-mode mmap",
    "--mlock": "gone since b10884: serve.load_mode: mlock is spelled --load-mode mlock",
    "-dio": "gone since b10884: serve.load_mode: dio is spelled --load-mode dio",
    "--direct-io": "gone since b10884: serve.load_mode: dio is spelled --load-mode dio",
    "-sm": _SPLIT,
    "--split-mode": _SPLIT,
}


def status(value: str) -> Status:
    """Life of a slug."""
    return Status(one_of(*(s.value for s in Status))(value))


def inside(value: str) -> str:
    """A path below a folder of ours: it is joined to MODEL_DIR and written to by `setup`."""
    path = PurePosixPath(value)
    if path.is_absolute() or value.startswith("~") or ".." in path.parts or "\\" in value:
        msg = f"{value!r} must lie below the model folder (put the folder into MODEL_DIR, no '..')"
        raise ValueError(msg)
    return value


def gguf(value: str) -> str:
    if not value.endswith(".gguf"):
        msg = f"{value!r} does not end in .gguf"
        raise ValueError(msg)
    return inside(value)


def repo(value: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", value):
        msg = f"expected owner/name, found {value!r}"
        raise ValueError(msg)
    return value


def drafter_type(value: str) -> str:
    if value in _NGRAM_TYPES:
        msg = f"{value} reads no draft model; expected one of {', '.join(DRAFTER_TYPES)}"
        raise ValueError(msg)
    return one_of(*DRAFTER_TYPES)(value)


def drafter_device(value: str) -> str:
    """A device's name, or "host" (llama.cpp's word is none). One: the shares of several belong to other devices."""
    if "," in value or not value.strip():
        msg = f"expected auto, host or one device's name, found {value!r}"
        raise ValueError(msg)
    return "host" if value == "none" else value


def need(value: str) -> str:
    if not re.fullmatch(r"flag:--?[\w-]+|spec-type:[\w-]+", value):
        msg = f"expected flag:--name or spec-type:name, found {value!r}"
        raise ValueError(msg)
    return value


def host(value: str) -> str:
    if not re.fullmatch(r"[\w.:-]+", value) or value.startswith("-"):
        msg = f"expected an address or a host name, found {value!r}"
        raise ValueError(msg)
    return value


def tokens(value: str) -> int:
    try:
        n = units.parse_tokens(value)
    except OverflowError:
        n = _MOST_TOKENS + 1
    if not 1 <= n <= _MOST_TOKENS:
        msg = f"{value} tokens is not from 1 to {_MOST_TOKENS:,}"
        raise ValueError(msg)
    return n


def numa(value: str) -> str:
    """A NUMA mode; `bind:1` names the node, `interleave:0,2-3` the nodes."""
    mode, colon, nodes = value.partition(":")
    if not colon or mode not in ("bind", "interleave"):
        return one_of(*NUMA_MODES)(value)
    if not re.fullmatch(r"\d{1,4}" if mode == "bind" else r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", nodes):
        what = "one node, as in bind:0" if mode == "bind" else "nodes, as in interleave:0,1 or interleave:0-3"
        msg = f"expected {what}, found {value!r}"
        raise ValueError(msg)
    return value


def layers(value: str) -> tuple[int, ...]:
    first, dash, last = value.partition("-")
    low = integer(0, 9999)(first)
    high = integer(0, 9999)(last) if dash else low
    if high < low:
        msg = f"the range {value} runs backwards"
        raise ValueError(msg)
    return tuple(range(low, high + 1))


def endpoint(value: str) -> str:
    host, _, port = value.rpartition(":")
    # The engine splits at the first colon, so it cannot be given an IPv6 address.
    if not re.fullmatch(r"[\w.-]+", host) or host.startswith("-"):
        msg = f"expected host:port with a name or an IPv4 address, found {value!r}"
        raise ValueError(msg)
    integer(1, 65535)(port)
    return value


def restarts(value: str) -> int:
    """How often: `off`, `on-failure` (once) or `on-failure:N`. Never without end: a load takes ten minutes."""
    if value == "off":
        return 0
    found = re.fullmatch(r"on-failure(?::(\d+))?", value)
    if found is None or not 1 <= int(found[1] or 1) <= MOST_RESTARTS:
        msg = f"expected off, on-failure or on-failure:N with N from 1 to {MOST_RESTARTS}, found {value!r}"
        raise ValueError(msg)
    return int(found[1] or 1)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def spelled(word: str) -> str:
    """A flag as `--help` spells it: the engine reads `_` in a long one as `-`."""
    name, equals, value = word.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value


def fights(words: Sequence[str], value_of: Callable[[str], str]) -> Iterator[tuple[int, str]]:
    """(index, problem) of every word of `extra_args` that is a flag of the plan's own, with both values.

    value_of  what the slug says for a key (`serve.n_ctx`)
    """
    for at, word in enumerate(words):
        flag, equals, value = spelled(word).partition("=")
        if flag not in OWNED_FLAGS:
            continue
        key = OWNED_FLAGS[flag]
        if not equals and at + 1 < len(words) and not re.match(r"--?[A-Za-z]", words[at + 1]):
            value = words[at + 1]
        problem = f"{flag} is the launcher's to write" + (f": use {key}" if key else "")
        if why := INSTEAD.get(flag):
            yield at, f"{problem} ({f'{flag} {value}'.strip()}: {why})"
        elif value and key:
            yield at, f"{problem} ({flag} {value} against {key}: {value_of(key)})"
        else:
            yield at, problem


def value_of(slug: Slug, key: str) -> str:
    """What a slug says for a key of OWNED_FLAGS, as text; `auto` where it leaves that to the plan."""
    room, _, name = key.partition(".")
    found = getattr(slug, room, None)
    if name and isinstance(found, Mapping):
        found = found.get(name)
    elif name:
        found = getattr(found, name, getattr(found, f"{name}_bytes", None))
    found = getattr(found, "file", found)
    return "auto" if found is None else str(found)
