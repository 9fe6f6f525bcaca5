"""Folders follow LAUNCHER_HOME, XDG and MODEL_DIR."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.facts import paths


def test_launcher_home_holds_all_three(launcher_home: Path) -> None:
    assert paths.config_dir() == launcher_home / "config"
    assert paths.state_dir() == launcher_home / "state"
    assert paths.cache_dir() == launcher_home / "cache"
    assert not list(launcher_home.iterdir()), "asking for a folder must not make it"


@pytest.mark.parametrize("home", ["", "  "])
def test_an_empty_launcher_home_is_no_home(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_HOME", home)
    for name in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    assert paths.config_dir() == tmp_path / "CONFIG" / "llama-launcher"
    assert paths.state_dir() == tmp_path / "STATE" / "llama-launcher"
    assert paths.cache_dir() == tmp_path / "CACHE" / "llama-launcher"


def test_launcher_home_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAUNCHER_HOME", "here")
    assert paths.state_dir() == tmp_path / "here" / "state"


def test_model_dir_names_several_folders_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MODEL_DIR", f"~/a:/srv/models/: :{tmp_path}/a")
    assert paths.model_dirs() == (tmp_path / "a", Path("/srv/models"))


def test_a_link_to_a_model_folder_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "models").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "models"))
    assert paths.model_dirs() == (tmp_path / "models",)


@pytest.mark.parametrize("value", [None, "", ":"])
def test_models_in_the_home_folder_without_model_dir(
    value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is not None:
        monkeypatch.setenv("MODEL_DIR", value)
    assert paths.model_dirs() == (tmp_path / "models",)
