"""A launch as a container: files behind links, the override and the words of `run`, read back; the gates."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import launcher
from launcher.errors import DeviceUnusable
from launcher.facts import container as facts
from launcher.facts import links
from launcher.serve import argv, compose, container
from launcher.structs import Container, EngineRef, Gate, Host, Image, Launch, Mount, Plan, Runtime
from launcher.units import GIB, KIB, MIB
from launcher.workflows import container as workflow
from tests.serve_builders import card, engine, inventory, plan, rpc_device, settings, slug

ROOT = Path(launcher.__file__).parent.parent
IMAGE = Image(name="ghcr.io/ggml-org/llama.cpp:server", digest="ab" * 32, entrypoint=("/app/llama-server",))
DOCKER = Runtime(kind="docker", path="/usr/bin/docker", version="28", limits_memory=True, nvidia=True)
PODMAN = Runtime(kind="podman", path="/usr/bin/podman", version="5", limits_memory=True)
LIMITS = {"nofile": (1024, 4096), "nproc": (-1, -1)}


def launch(p: Plan, *, env: Mapping[str, str] | None = None, **more: Any) -> Launch:
    return argv.build(
        p, engine=engine(), host="127.0.0.1", port=8040, alias="m", slug=more.pop("slug", None),
        base_env=env or {"PATH": "/usr/bin"}, empty_config="/state/empty", **more,
    )  # fmt: skip


def box(p: Plan, runtime: Runtime = DOCKER, files: tuple[str, ...] = ("/models/m.gguf",), **more: Any) -> Container:
    image = more.pop("image", IMAGE)
    return container.contained(launch(p, **more), runtime, image, files=files, home="/state", limits=LIMITS)


def hub(folder: Path) -> tuple[str, str]:
    """Two shards as the Hugging Face cache keeps them: links in a snapshot to blobs without a name."""
    snapshot = folder / "hub" / "models--a--b" / "snapshots" / "rev"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    paths = []
    for i in (1, 2):
        (blobs / f"blob{i}").write_bytes(b"GGUF")
        link = snapshot / f"m-0000{i}-of-00002.gguf"
        link.symlink_to(f"../../blobs/blob{i}")
        paths.append(str(link))
    return paths[0], paths[1]


# ------------------------------------------------------------------------------------------ mounts


def test_links_of_the_hub_cache_open_inside_by_the_names_that_they_have_outside(tmp_path: Path) -> None:
    files = hub(tmp_path)
    mounts = links.mounts_for(files)
    assert len(mounts) == 2
    for path in files:
        assert links.resolved(path, mounts) == str(Path(path).resolve())
    snapshot_alone = tuple(m for m in mounts if "blobs" not in m.target)
    assert [links.resolved(path, snapshot_alone) for path in files] == [None, None]


def test_a_link_that_starts_in_a_linked_folder_is_looked_for_where_the_container_looks(tmp_path: Path) -> None:
    (path, _) = hub(tmp_path)
    short = tmp_path / "m"
    short.symlink_to(Path(path).parent)
    named = str(short / Path(path).name)
    mounts = links.mounts_for([named])
    assert links.resolved(named, mounts) == str(Path(path).resolve())
    # inside, `m` is a folder and no link: `../../blobs` starts there
    assert {m.target for m in mounts} == {str(short), str(tmp_path.parent / "blobs")}


def test_absolute_links_and_chains_of_links_are_followed(tmp_path: Path) -> None:
    far = tmp_path / "disk" / "real.gguf"
    far.parent.mkdir()
    far.write_bytes(b"GGUF")
    middle = tmp_path / "middle" / "x.gguf"
    middle.parent.mkdir()
    middle.symlink_to(far)
    first = tmp_path / "models" / "m.gguf"
    first.parent.mkdir()
    first.symlink_to("../middle/x.gguf")
    mounts = links.mounts_for([str(first)])
    assert {m.target for m in mounts} == {str(p.parent) for p in (first, middle, far)}
    assert links.resolved(str(first), mounts) == str(far)
    assert links.resolved(str(first), [m for m in mounts if m.target != str(middle.parent)]) is None


def test_a_folder_inside_of_another_is_mounted_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for path in (tmp_path / "a.gguf", tmp_path / "sub" / "b.gguf"):
        path.write_bytes(b"")
    assert links.mounts_for([str(tmp_path / "a.gguf"), str(tmp_path / "sub" / "b.gguf")]) == (
        Mount(source=str(tmp_path), target=str(tmp_path)),
    )


def test_a_key_file_is_mounted_alone(tmp_path: Path) -> None:
    key = tmp_path / "secrets" / "key"
    key.parent.mkdir()
    key.write_text("k")
    (tmp_path / "m.gguf").write_bytes(b"")
    other = tmp_path.parent / "elsewhere.gguf"
    assert Mount(source=str(key), target=str(key)) in links.mounts_for([str(other.parent / "x" / "m.gguf")], [str(key)])


# ---------------------------------------------------------------------------------------- documents

CARDS = plan(card("CUDA0"), card("CUDA1"))
CASES = {
    "cards, docker": (CARDS, DOCKER),
    "cards, podman": (CARDS, PODMAN),
    "host alone": (plan(), DOCKER),
    "no limit can be raised": (plan(), replace(PODMAN, raises_limits=False, most_memlock_bytes=8 * MIB)),
    "memory cannot be limited": (plan(), replace(PODMAN, limits_memory=False)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_override_says_the_container_and_nothing_else(case: str) -> None:
    made = box(*CASES[case])
    document = yaml.safe_load(yaml.safe_dump(compose.override(made)))
    said = compose.parse_override(document)
    assert said.pop("image") == made.image.name
    assert said == {field: getattr(made, field) for field in said}
    assert set(said) == set(made.__dataclass_fields__) - {"runtime", "image"}


def test_every_dollar_of_a_rule_is_doubled_for_compose_and_single_for_run() -> None:
    p = replace(CARDS, rules=tuple(replace(r, pattern=r.pattern + "$") for r in CARDS.rules))
    made = box(p)
    assert any("$" in word for word in made.command)
    text = "".join(compose.override(made)["services"]["llama-server"]["command"])
    assert text.count("$") == 2 * text.count("$$") > 0
    assert not any("$$" in word for word in compose.run_words(made, detach=True))


def test_the_command_is_a_list_and_the_cards_are_uuids() -> None:
    made = box(CARDS)
    service = compose.override(made)["services"]["llama-server"]
    assert isinstance(service["command"], list)
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": list(made.cards), "capabilities": ["gpu"]}
    assert made.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert made.environment["CUDA_VISIBLE_DEVICES"] == ",".join(made.cards)
    podman = compose.override(box(CARDS, PODMAN))["services"]["llama-server"]
    assert podman["devices"] == [f"nvidia.com/gpu={uuid}" for uuid in made.cards]
    assert "deploy" not in podman


def test_the_words_of_run_say_the_same() -> None:
    made = box(CARDS)
    words = compose.run_words(made, detach=True)
    at = words.index(made.image.name)
    assert words[at + 1 :] == made.command
    pairs = list(zip(words, words[1:], strict=False))
    assert [f for w, v in pairs if w == "--gpus" for f in next(csv.reader([v]))] == ["device=" + ",".join(made.cards)]
    assert {v for w, v in pairs if w == "--env"} == {f"{k}={v}" for k, v in made.environment.items()}
    assert ("--memory", f"{made.memory_bytes}b") in pairs
    assert ("--ulimit", "memlock=-1:-1") in pairs
    assert ("--network", "host") in pairs
    assert ("--pull", "never") in pairs


def test_a_comma_in_a_folder_stays_in_its_field() -> None:
    made = replace(box(plan()), mounts=(Mount(source="/m/a,b", target="/m/a,b"),))
    words = compose.run_words(made, detach=True)
    (mount,) = next(csv.reader([words[words.index("--mount") + 1]]))[1:2]
    assert mount == "source=/m/a,b"


def test_no_key_stands_in_a_document_or_in_words(tmp_path: Path) -> None:
    made = box(plan(), env={"PATH": "/usr/bin", "LLAMA_API_KEY": "sesame", "HF_TOKEN": "hf_secret"})
    assert made.passed == ("LLAMA_API_KEY",)
    document = yaml.safe_dump(compose.override(made))
    words = " ".join(compose.run_words(made, detach=True))
    for text in (document, words):
        assert "sesame" not in text
        assert "hf_secret" not in text
        assert "LLAMA_API_KEY" in text
    key = tmp_path / "key"
    key.write_text("sesame")
    by_file = box(plan(), slug=slug(api_key_file=str(key)))
    assert Mount(source=str(key), target=str(key)) in by_file.mounts
    assert "sesame" not in yaml.safe_dump(compose.override(by_file))


def test_an_image_without_an_entrypoint_is_given_one() -> None:
    made = box(plan(), image=replace(IMAGE, entrypoint=()))
    assert made.entrypoint == ("/opt/llama-server",)
    words = compose.run_words(made, detach=False)
    assert words[words.index("--entrypoint") + 1] == "/opt/llama-server"


def test_compose_reads_both_files_into_one_service() -> None:
    base = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["llama-server"]
    over = compose.override(box(CARDS))["services"]["llama-server"]
    assert set(base) & set(over) == {"ulimits"}  # the one thing that both say: the override wins, limit by limit
    assert base["network_mode"] == "host"
    assert "ports" not in over


def test_two_homes_give_two_containers_and_names_are_safe() -> None:
    one, other = container.name_of("a/B@x+y.gguf", "/h1"), container.name_of("a/B@x+y.gguf", "/h2")
    assert one != other
    assert one == container.name_of("a/B@x+y.gguf", "/h1")
    assert set(one) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert len(container.name_of("/" + "x" * 300, "/h")) < 100


# -------------------------------------------------------------------------------------------- gates


def closed(p: Plan, made: Container, files: tuple[str, ...] = (), **host: Any) -> dict[str, Gate]:
    found = container.gates(made, p, inventory(**host).host, files)
    return {g.name: g for g in found if not g.ok}


def test_all_gates_are_open_for_a_container_that_can_be_had(tmp_path: Path) -> None:
    files = hub(tmp_path)
    assert closed(CARDS, box(CARDS, files=files), files) == {}


def test_memory_is_the_sum_a_twentieth_and_half_a_gibibyte() -> None:
    p = plan()
    limit = container.limit_bytes(p)
    assert limit % MIB == 0
    assert 0 <= limit - (p.host.required_bytes * 21 // 20 + 512 * MIB) <= MIB
    made = box(p)
    assert closed(p, made, available_bytes=limit) == {}
    (gate,) = closed(p, made, available_bytes=limit - MIB).values()
    assert gate.name == "container-memory-short"
    assert f"{limit // MIB:,} MiB" in gate.detail


def test_locked_memory_is_what_the_runtime_may_give() -> None:
    p = plan(settings=settings(load_mode="mlock"))
    p = replace(p, host=replace(p.host, terms={**p.host.terms, "experts": GIB}))
    little = replace(PODMAN, most_memlock_bytes=64 * KIB)
    assert set(closed(p, box(p, little))) == {"container-memlock-short"}
    assert closed(p, box(p, PODMAN)) == {}
    plain = plan(settings=settings(load_mode="none"))
    assert closed(plain, box(plain, little)) == {}


def test_a_link_cut_off_by_a_mount_is_refused_by_name(tmp_path: Path) -> None:
    files = hub(tmp_path)
    made = box(plan(), files=files)
    cut = replace(made, mounts=tuple(m for m in made.mounts if "blobs" not in m.target))
    (gate,) = closed(plan(), cut, files).values()
    assert gate.name == "container-mount-cut"
    assert files[0] in gate.detail


def test_a_model_at_the_top_would_hide_the_image() -> None:
    made = box(plan(), files=("/m.gguf",))
    assert set(closed(plan(), made, ("/m.gguf",))) == {"container-mount-cut"}


def test_cards_need_cdi_with_podman_and_a_runtime_with_docker() -> None:
    assert set(closed(CARDS, box(CARDS, PODMAN))) == {"container-cdi-missing"}
    named = replace(PODMAN, cdi=frozenset(f"nvidia.com/gpu={u}" for u in box(CARDS).cards))
    assert closed(CARDS, box(CARDS, named)) == {}
    assert set(closed(CARDS, box(CARDS, replace(DOCKER, nvidia=False)))) == {"container-no-nvidia"}


def test_only_cards_with_a_uuid_can_be_handed_on() -> None:
    vulkan = replace(card("Vulkan0"), backend="vulkan", uuid=None)
    p = plan(vulkan)
    assert set(closed(p, box(p))) == {"container-device"}
    remote = plan(rpc_device(0, 50052))
    assert closed(remote, box(remote)) == {}


# -------------------------------------------------------------------------------------------- facts


def client(folder: Path, name: str, answers: Mapping[str, tuple[int, str]]) -> Path:
    """A client that knows some answers, by its words; it writes down what it was asked."""
    path = folder / name
    table = json.dumps({k: list(v) for k, v in answers.items()})
    path.write_text(
        "#!/usr/bin/env python3\nimport json, sys\n"
        f"open({str(folder / 'asked')!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))\n"
        f"answers = json.loads({table!r})\n"
        "key = next((k for k in answers if k in ' '.join(sys.argv[1:])), None)\n"
        "code, text = answers.get(key, (125, ''))\nprint(text)\nsys.exit(code)\n"
    )
    path.chmod(0o755)
    return path


HELP = "-m,    --model FNAME   m\n--port PORT   p\n-c,    --ctx-size N   c\n--spec-type none,draft-mtp   s\n"


def test_docker_without_a_daemon_is_passed_over_for_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client(tmp_path, "docker", {"info": (0, json.dumps({"ServerErrors": ["no daemon"]}))})
    info = {"host": {"cgroupControllers": ["cpu"], "security": {"rootless": True}}, "version": {"Version": "5.4"}}
    monkeypatch.setenv("PATH", str(tmp_path) + ":/usr/bin:/bin")
    env = {"PATH": str(tmp_path) + ":/usr/bin:/bin"}
    with pytest.raises(DeviceUnusable, match="docker does not run containers") as refused:
        facts.find_runtime("docker", env)
    assert "no daemon" in refused.value.context
    client(tmp_path, "podman", {"info": (0, json.dumps(info))})
    found = facts.find_runtime("auto", env)
    assert (found.kind, found.version, found.rootless, found.limits_memory) == ("podman", "5.4", True, False)
    assert found.raises_limits is False


def test_an_engine_in_an_image_is_asked_once_by_its_digest(tmp_path: Path) -> None:
    path = client(tmp_path, "podman", {"--help": (0, HELP), "--version": (0, "version: 9 (build 1)")})
    runtime = replace(PODMAN, path=str(path))
    env = {"PATH": "/usr/bin:/bin"}
    first = facts.probe(runtime, IMAGE, env)
    assert (first.path, first.version, first.digest) == ("/app/llama-server", "9 (build 1)", IMAGE.digest)
    assert {"--model", "-c", "--port"} <= first.flags
    asked = (tmp_path / "asked").read_text()
    assert facts.probe(runtime, IMAGE, env) == first
    assert (tmp_path / "asked").read_text() == asked
    facts.probe(runtime, replace(IMAGE, digest="cd" * 32), env)
    assert len((tmp_path / "asked").read_text()) == 2 * len(asked)


def test_an_image_of_something_else_is_refused(tmp_path: Path) -> None:
    path = client(tmp_path, "podman", {"--help": (0, "usage: hello")})
    with pytest.raises(DeviceUnusable) as refused:
        facts.probe(replace(PODMAN, path=str(path)), IMAGE, {"PATH": "/usr/bin:/bin"})
    assert refused.value.reference == "image-no-engine"


def test_an_image_that_is_not_here_is_never_fetched(tmp_path: Path) -> None:
    path = client(tmp_path, "podman", {"inspect": (125, "Error: no such image")})
    with pytest.raises(DeviceUnusable) as refused:
        facts.read_image(replace(PODMAN, path=str(path)), "a/b:c", {"PATH": "/usr/bin:/bin"})
    assert (refused.value.reference, refused.value.fix) == ("image-missing", "podman pull a/b:c")
    assert "pull" not in (tmp_path / "asked").read_text()


def test_cdi_files_name_cards_by_uuid(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices:\n- name: GPU-aa-01\n- name: '0'\n")
    (tmp_path / "other.yaml").write_text("kind: vendor.com/x\ndevices:\n- name: GPU-bb\n")
    assert facts.cdi_devices((tmp_path, tmp_path / "none")) == {"nvidia.com/gpu=GPU-aa-01"}


def test_the_host_of_the_gates_is_the_one_that_was_planned_with() -> None:
    host = Host(total_bytes=2 * GIB, available_bytes=GIB // 4, limited_by="MemAvailable", cores=1)
    names = [g.name for g in container.gates(box(plan()), plan(), host, ()) if not g.ok]
    assert names == ["container-memory-short"]


def test_the_image_of_a_slug_alone_asks_for_no_container() -> None:
    """Shipped slugs name one; most people have a llama-server and no container runtime."""
    named = slug(engine=EngineRef(image="ghcr.io/ggml-org/llama.cpp:server-cuda"))
    assert workflow.wanted(named, {}, None) is None
    assert workflow.wanted(named, {"container": "podman"}, None) == ("podman", "ghcr.io/ggml-org/llama.cpp:server-cuda")
    assert workflow.wanted(named, {"image": "mine:1"}, None) == ("auto", "mine:1")
