"""The command line and environment of a plan, and that both say what the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.errors import DeviceUnusable, SlugInvalid
from launcher.serve import argv
from launcher.structs import Launch, Plan, Slug
from launcher.units import MIB
from tests.serve_builders import B11434, card, engine, plan, rpc_device, settings, slug

BASE = {"PATH": "/bin", "HOME": "/home/u"}


def launch(p: Plan, s: Slug | None = None, flags: frozenset[str] = B11434, env: dict[str, str] | None = None) -> Launch:
    return argv.build(
        p,
        engine=engine(flags=flags),
        host="127.0.0.1",
        port=8030,
        alias="smol",
        slug=s,
        base_env=BASE if env is None else env,
        empty_config="/empty",
    )


def test_a_plan_on_two_rpc_devices_word_by_word() -> None:
    p = plan(rpc_device(0, 50052), rpc_device(1, 50053))
    assert " ".join(launch(p).argv) == (
        "/opt/llama-server --rpc 127.0.0.1:50052,127.0.0.1:50053 -m /models/m.gguf -c 2048 -np 1 -no-kvu -ngl 999 "
        "-dev RPC0,RPC1 -sm layer -ts 3,2 -t 2 -b 2048 -ub 512 -fa on -ctk f16 -ctv f16 --load-mode none "
        "--cache-ram 0 --ctx-checkpoints 1 --host 127.0.0.1 --port 8030 --alias smol --fit off -lv 4 -ot "
        r"^blk\.(0)\.ffn_x_exps=RPC0[127.0.0.1:50052],^blk\.(0)\.ffn_x_exps=RPC0[127.0.0.1:50053],\.ffn_x_exps=CPU "
        "--metrics"
    )


def test_argv_parses_back_to_the_plan() -> None:
    p = plan(
        card("CUDA0"),
        card("CUDA1"),
        drafter_path="/models/d.gguf",
        settings=settings(
            n_parallel=4,
            kv_unified=True,
            n_batch=4096,
            n_ubatch=4096,
            type_k="q8_0",
            type_v="q8_0",
            cache_ram_bytes=2048 * MIB,
            drafter_type="draft-dspark",
            draft_n_max=5,
            numa="distribute",
        ),
    )
    said = argv.parse_back(launch(p).argv)
    assert said["n_ctx_total"] == p.n_ctx_total == 8192
    assert argv.planned_split(launch(p).argv) == (("CUDA0", "CUDA1"), p.tensor_split)
    assert said["rules"] == tuple((r.pattern, r.buffer_type) for r in p.rules)
    assert {k: said[k] for k in ("n_parallel", "n_batch", "n_ubatch", "type_k", "type_v", "threads", "load_mode")} == {
        "n_parallel": 4,
        "n_batch": 4096,
        "n_ubatch": 4096,
        "type_k": "q8_0",
        "type_v": "q8_0",
        "threads": 2,
        "load_mode": "none",
    }
    assert said["cache_ram"] == 2048
    assert said["kv_unified"] is True
    assert (said["drafter"], said["spec_type"], said["draft_n_max"]) == ("/models/d.gguf", "draft-dspark", 5)
    assert said["numa"] == "distribute"
    assert "extra" not in said


def test_without_devices_nothing_is_offloaded() -> None:
    said = argv.parse_back(launch(plan()).argv)
    assert (said["devices"], said["n_gpu_layers"]) == (("none",), 0)
    assert not {"tensor_split", "rules", "rpc", "split_mode"} & said.keys()
    assert argv.planned_split(launch(plan()).argv) == ((), ())


def test_an_endpoint_with_two_devices_is_named_once() -> None:
    first, second = rpc_device(0, 50052), replace(rpc_device(1, 50052), buffer_type="RPC1[127.0.0.1:50052]")
    said = argv.parse_back(launch(plan(first, second)).argv)
    assert said["rpc"] == ("127.0.0.1:50052",)
    assert said["devices"] == ("RPC0", "RPC1")


@pytest.mark.parametrize(
    "off",
    [
        {"drafter_type": None},
        {"drafter_type": "draft-dspark", "draft_n_max": 0},
        {"drafter_type": "none", "draft_n_max": 5},
    ],
)
def test_drafter_off_leaves_no_drafter_flag(off: dict[str, object]) -> None:
    """A depth of 0 with the flags in place still loads the draft model and runs it."""
    words = launch(plan(card(), drafter_path="/models/d.gguf", settings=settings(**off))).argv
    assert not [w for w in words if w == "-md" or w.startswith("--spec") or w == "/models/d.gguf"]


def test_heads_in_the_models_own_file_need_no_second_model() -> None:
    words = launch(plan(card(), settings=settings(drafter_type="draft-mtp", draft_n_max=2))).argv
    assert "-md" not in words
    assert argv.parse_back(words)["draft_n_max"] == 2


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("none", ["--no-mmap"]),
        ("mmap", []),
        ("mlock", ["--no-mmap", "--mlock"]),
        ("mmap+mlock", ["--mlock"]),
        ("dio", ["--no-mmap", "--direct-io"]),
    ],
)
def test_load_modes_of_an_engine_without_the_one_flag(mode: str, words: list[str]) -> None:
    old = B11434 - {"--load-mode", "-lm"} | {"--no-mmap", "--mlock", "--direct-io"}
    built = launch(plan(settings=settings(load_mode=mode)), flags=old).argv
    assert [w for w in built if w in ("--no-mmap", "--mlock", "--direct-io", "--load-mode")] == words
    assert argv.parse_back(launch(plan(settings=settings(load_mode=mode))).argv)["load_mode"] == mode


def test_a_needed_flag_that_the_engine_lacks_is_named_with_its_version() -> None:
    p = plan(card(), drafter_path="/d.gguf", settings=settings(drafter_type="draft-dspark", draft_n_max=5))
    old = B11434 - {"--spec-type", "--spec-draft-n-max"}
    with pytest.raises(DeviceUnusable) as error:
        launch(p, flags=old)
    assert error.value.reference == "engine-lacks"
    assert error.value.exit_code == 5
    assert "--spec-type, --spec-draft-n-max" in error.value.message
    assert "build 0" in error.value.message
    assert argv.missing_flags(p, engine(flags=old), None) == ("--spec-type", "--spec-draft-n-max")


def test_flags_that_do_no_harm_when_absent_are_left_out_with_a_reason() -> None:
    old = B11434 - {"--cache-ram", "-cram", "--fit", "-fit", "--metrics"}
    p = plan(card())
    assert not {"--cache-ram", "--fit", "--metrics"} & set(launch(p, flags=old).argv)
    reasons = argv.left_out(p, engine(flags=old), None)
    assert [r.partition(":")[0] for r in reasons] == ["--cache-ram", "--fit", "--metrics"]
    assert all(r.partition(": ")[2] for r in reasons)


def test_what_a_slug_adds_and_extra_args_come_last_verbatim() -> None:
    s = slug(
        sampling={"temperature": 0.6, "top_p": 0.95, "top_k": 40.0},
        thinking=False,
        chat_template="templates/x.jinja",
        api_key_file="/etc/keys",
        extra_args=("--override-kv", "a=int:1,b=int:2", "--seed", "7"),
    )
    words = launch(plan(card()), s).argv
    assert words[-4:] == ("--override-kv", "a=int:1,b=int:2", "--seed", "7")
    said = argv.parse_back(words)
    assert (said["temperature"], said["top_p"], said["top_k"]) == (0.6, 0.95, 40.0)
    assert words[words.index("--top-k") + 1] == "40"
    assert said["reasoning"] == "off"
    assert said["chat_template_file"] == "/slugs/demo/templates/x.jinja"
    assert said["api_key_file"] == "/etc/keys"
    without = launch(plan(card()), s, flags=B11434 - {"-rea", "--reasoning"}).argv
    assert argv.parse_back(without)["reasoning_budget"] == 0
    assert "chat_template" in argv.parse_back(launch(plan(), slug(chat_template="chatml")).argv)


@pytest.mark.parametrize(
    "flag", ["-devd", "-otd", "-ngld", "-cmoed", "-ncmoed", "--spec-draft-device=none", "-ts", "-c"]
)
def test_extra_args_that_would_undo_the_plan_are_refused(flag: str) -> None:
    """They come last, and the engine takes the last value."""
    with pytest.raises(SlugInvalid) as error:
        launch(plan(card()), slug(extra_args=("--no-warmup", flag, "1")))
    assert error.value.reference == "slug-invalid"
    assert f"extra_args[1]: {flag.partition('=')[0]} is the launcher's to write" in error.value.context
    assert error.value.fix.startswith("${EDITOR:-vi} ")


def test_an_unresolved_plan_is_a_bug_not_a_launch() -> None:
    with pytest.raises(ValueError, match="threads"):
        launch(plan(settings=settings(threads=None)))


def test_the_environment_is_scrubbed_and_cards_go_by_uuid_in_plan_order() -> None:
    dirty = BASE | {
        "LLAMA_ARG_CPU_MOE": "1",
        "LLAMA_SERVER_ROUTER_PORT": "1",
        "GGML_CUDA_NO_PINNED": "1",
        "GGML_CUDA_DEVICES": "2",
        "HF_TOKEN": "secret",
        "HUGGING_FACE_HUB_TOKEN": "secret",
        "LLAMA_API_KEY": "kept",
        "LD_LIBRARY_PATH": "/x",
        "XDG_CONFIG_HOME": "/home/u/.config",
    }
    built = launch(plan(card("CUDA0", uuid="GPU-b"), card("CUDA1", uuid="GPU-a")), env=dirty)
    assert built.env == {
        "PATH": "/bin",
        "HOME": "/home/u",
        "LLAMA_API_KEY": "kept",
        "LD_LIBRARY_PATH": "/x",
        **built.env_set,
    }
    assert built.env_set == {
        "XDG_CONFIG_HOME": "/empty",
        "LC_ALL": "C",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a",
    }


def test_virtual_cards_share_a_uuid_and_keep_their_variable() -> None:
    halves = [card(f"CUDA{i}", uuid="GPU-a", description=f"NVIDIA H200 (dev p0/v{i})") for i in range(2)]
    built = launch(plan(*halves), env=BASE | {"GGML_CUDA_DEVICES": "2"})
    assert built.env_set["GGML_CUDA_DEVICES"] == "2"
    assert built.env_set["CUDA_VISIBLE_DEVICES"] == "GPU-a"


def test_cards_that_were_not_renumbered_are_not_hidden_from_each_other() -> None:
    """CUDA1 alone would be called CUDA0 once only it were visible; -dev names it among all."""
    built = launch(plan(card("CUDA1")))
    assert "CUDA_VISIBLE_DEVICES" not in built.env_set
    assert argv.parse_back(built.argv)["devices"] == ("CUDA1",)


def test_the_dry_run_differs_in_fit_log_and_address_only() -> None:
    real = replace(launch(plan(card())), host="0.0.0.0")
    real = replace(real, argv=tuple("0.0.0.0" if w == "127.0.0.1" else w for w in real.argv))
    dry = argv.dry_run_argv(real, 40404)
    changed = [(a, b) for a, b in zip(real.argv, dry, strict=False) if a != b]
    assert changed == [("0.0.0.0", "127.0.0.1"), ("8030", "40404"), ("off", "on")]
    assert dry[len(real.argv) :] == ("--log-jsonl",)


def test_cpu_rpc_devices_wait_without_spinning_unless_a_person_said_how() -> None:
    """They take turns with the engine on the same cores; cards and their host threads are left as they are."""
    on_cpu = plan(rpc_device(0, 50052), rpc_device(1, 50053))

    def said(p: Plan, **base: str) -> str | None:
        return argv.environment(p, base_env=base, empty_config="/e")[1].get("OMP_WAIT_POLICY")

    assert said(on_cpu) == "passive"
    assert said(on_cpu, OMP_WAIT_POLICY="active") is None
    assert said(on_cpu, GOMP_SPINCOUNT="1000") is None
    assert said(plan(card())) is None
