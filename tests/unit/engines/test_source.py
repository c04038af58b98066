"""Where a model's files lie."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlhf_lightning.directories import adding
from rlhf_lightning.engines import check_model, check_packed, has_tokenizer, max_positions, read_config
from rlhf_lightning.engines.huggingface import source
from rlhf_lightning.engines.huggingface.models import load_causal_lm, load_scalar
from rlhf_lightning.spec import EMBEDDED_DIRECTORY, ModelSpec


def hub_with(directory: Path, *files: str) -> None:
    """A cache of the hub in which the model `some/model` has these files of the embedded one."""
    model = directory / "models--some--model"
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text("0" * 40)
    (model / "snapshots" / ("0" * 40)).mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy(EMBEDDED_DIRECTORY / file, model / "snapshots" / ("0" * 40))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a hub that is not asked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("files", "has"), [(("config.json", "tokenizer.json"), True), (("config.json",), False)]
)
def test_a_hub_name_is_looked_up(files: tuple[str, ...], has: bool, hub: Path) -> None:
    hub_with(hub, *files)
    assert has_tokenizer(ModelSpec(path="some/model")) == has
    assert max_positions(ModelSpec(path="some/model")) == max_positions(ModelSpec())
    assert not has_tokenizer(ModelSpec(path="some/other"))
    assert max_positions(ModelSpec(path="some/other")) is None
    check_model(ModelSpec(path="some/model"))
    with pytest.raises(ValueError, match=r"^path=some/other: no such directory here, and the hub does not"):
        check_model(ModelSpec(path="some/other"))


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar])
def test_weights_of_a_hub_name_are_never_made_up(
    load: Callable[[ModelSpec], object], hub: Path, tmp_path: Path
) -> None:
    spec = ModelSpec(path="some/model")
    hub_with(hub, "config.json", "tokenizer.json")
    with pytest.raises(ValueError, match=r"^path=some/model: the hub, or its cache here, has no safetensors"):
        load(spec)
    assert read_config(spec).model_type == read_config(ModelSpec()).model_type
    source.copy_tokenizer(spec, tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    hub_with(hub, "model.safetensors")
    load(spec)


def test_templates_beside_the_default_belong_to_the_tokenizer(tmp_path: Path) -> None:
    model, old = tmp_path / "model", tmp_path / "old"
    for directory, name in ((model, "rag"), (old, "tool_use")):
        (directory / "additional_chat_templates").mkdir(parents=True)
        (directory / "additional_chat_templates" / f"{name}.jinja").write_text(name)
    (model / "config.json").write_text("{}")
    with adding(old, last="config.json", replaces=source.TOKENIZER_FILES) as fresh:
        source.copy_tokenizer(ModelSpec(path=str(model)), fresh)
        (fresh / "config.json").write_text("{}")
    assert [file.name for file in (old / "additional_chat_templates").iterdir()] == ["rag.jinja"]


def test_no_weights_of_a_hub_name_are_fetched_to_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetched(_: str, *, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(EMBEDDED_DIRECTORY)

    monkeypatch.setattr(source, "snapshot_download", fetched)
    for check in (check_model, lambda spec: check_packed(spec, "lm"), read_config):
        check(ModelSpec(path="some/model"))
        assert "config.json" in asked
    assert [pattern for pattern in asked if "safetensors" in pattern] == []


def test_a_directory_whose_name_could_be_a_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EMBEDDED_DIRECTORY, tmp_path / "some" / "model")
    monkeypatch.chdir(tmp_path)
    assert has_tokenizer(ModelSpec(path="some/model"))


@pytest.mark.parametrize("beside", ["model_world_size_2_rank_0.pt", "dist_ckpt"])
def test_the_part_of_a_checkpoint_of_verls_without_weights(beside: str, tmp_path: Path) -> None:
    directory = tmp_path / "actor" / "huggingface"
    directory.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(EMBEDDED_DIRECTORY / file, directory)
    spec = ModelSpec(path=str(directory))
    check_model(spec)
    (directory.parent / beside).mkdir()
    with pytest.raises(ValueError, match=rf"huggingface: has no weights; they are .*{beside}\. Merge"):
        check_model(spec)
