"""PPO with adapters: the reference is the actor without them, and what is saved, resumed and exported."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_lightning.algos import PPO
from rlhf_lightning.commands import export
from rlhf_lightning.data import TaskData
from rlhf_lightning.engines import FSDP, FSDPEngine, Head, check_model
from rlhf_lightning.engines.fsdp.base_model import BaseModelEngine
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.spec import LoRA, ModelSpec, OptimizerSpec, Sampling
from rlhf_lightning.strategies import Local
from rlhf_lightning.workers import Actor, Critic, Generator, Reference, Reward, Role, Settings
from rlhf_lightning.workers.naming import naming_role
from tests.unit.algos.short import trainer
from tests.unit.algos.small import built, write_model

LAYOUT = ParallelLayout(d=2)
FAST = OptimizerSpec(lr=1e-2)
STEPS = 3
HEADS: dict[str, Head] = {"actor": "lm", "critic": "scalar"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    bare, whole = tmp_path_factory.mktemp("bare"), tmp_path_factory.mktemp("whole")
    FSDPEngine(ModelSpec(path=write_model(bare), init_seed=3)).export(whole)
    return str(whole)


def ppo(path: str, *, reference: Reference | None = None) -> PPO:
    lora = LoRA(rank=4)
    return PPO(
        actor=Actor(path=path, optimizer=FAST, lora=lora, sampling=Sampling(max_new_tokens=6)),
        critic=Critic(optimizer=FAST, lora=lora),
        reference=reference or Reference(),
        reward=Reward(functions={"length": 100.0}),
    )


class Watch(Callback):
    """The divergence from the reference in every iteration, and at the end the models."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.roles: dict[str, Role] = {}
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        self.kl.append(float(trainer.logged_metrics["actor/kl"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.roles = built(pl_module)
        trained = {name: role for name, role in self.roles.items() if role.trains}
        self.weights = {name: role.engine.give_weights() for name, role in trained.items()}


def fit(algorithm: PPO, root: Path, *, steps: int = STEPS, resume: bool = False) -> Watch:
    watch = Watch()
    saving = ModelCheckpoint(dirpath=root, every_n_train_steps=1, save_last=True)
    run = trainer(Local(), root, steps=steps, callbacks=[watch, saving], enable_checkpointing=True)
    data = TaskData(batch_size=6, num_rows=6 * STEPS, num_val_rows=0)
    run.fit(algorithm, datamodule=data, ckpt_path="last" if resume else None, weights_only=False)
    return watch


@pytest.fixture(scope="module")
def learned(path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Watch, Path]:
    root = tmp_path_factory.mktemp("run")
    return fit(ppo(path), root), root


def test_the_reference_is_the_actor_without_its_adapters(learned: tuple[Watch, Path], path: str) -> None:
    watch, _ = learned
    assert isinstance(watch.roles["reference"].engine, BaseModelEngine)
    assert watch.kl[0] == pytest.approx(0, abs=1e-6)
    assert watch.kl[-1] > 1e-3
    assert not torch.equal(watch.weights["actor"], FSDPEngine(ModelSpec(path=path)).give_weights())


def test_a_reference_of_its_own_sees_the_same(learned: tuple[Watch, Path], path: str, tmp_path: Path) -> None:
    same = fit(ppo(path, reference=Reference(decay=1.0)), tmp_path)
    assert not isinstance(same.roles["reference"].engine, BaseModelEngine)
    assert same.kl == pytest.approx(learned[0].kl, abs=1e-5)
    torch.testing.assert_close(same.weights["actor"], learned[0].weights["actor"], rtol=0, atol=1e-5)


def test_a_resumed_run_learns_the_same(learned: tuple[Watch, Path], path: str, tmp_path: Path) -> None:
    part = fit(ppo(path), tmp_path, steps=1)
    again = fit(ppo(path), tmp_path, resume=True)
    assert not torch.equal(part.weights["actor"], again.weights["actor"])
    for name, weights in learned[0].weights.items():
        torch.testing.assert_close(again.weights[name], weights, rtol=0, atol=1e-6)


def test_an_export_is_merged(learned: tuple[Watch, Path], tmp_path: Path) -> None:
    watch, root = learned
    for role, head in HEADS.items():
        export.run([str(root / "last.ckpt"), str(tmp_path / role), role])
        assert not list((tmp_path / role).glob("adapter*"))
        plain = FSDPEngine(ModelSpec(path=str(tmp_path / role)), head=head)
        torch.testing.assert_close(plain.give_weights(), watch.weights[role], rtol=0, atol=1e-6)


def test_an_export_of_adapters_alone_is_what_peft_reads(
    learned: tuple[Watch, Path], path: str, tmp_path: Path
) -> None:
    """The critic's head is fresh and has learned: it is among its adapters."""
    watch, root = learned
    out = {role: tmp_path / role for role in ("actor", "critic")}
    for role, kind in (("actor", AutoModelForCausalLM), ("critic", AutoModelForSequenceClassification)):
        out[role].mkdir()
        (out[role] / "chat_template.jinja").write_text("another model's")
        export.run([str(root / "last.ckpt"), str(out[role]), "--adapters", role])
        assert {file.name for file in out[role].iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
            "tokenizer.json",
        }
        assert not [*out[role].glob("model*"), *out[role].glob("chat_template*")]
        with pytest.raises(ValueError, match=f"{role}: holds adapters, and no model. Type"):
            check_model(ModelSpec(path=str(out[role])))
        options = json.loads((out[role] / "adapter_config.json").read_text())
        assert options["modules_to_save"] == (["score"] if role == "critic" else None)
        names = load_file(out[role] / "adapter_model.safetensors")
        assert {name.rpartition(".lora_")[2] for name in names if "lora" in name} == {"A.weight", "B.weight"}
        base = kind.from_pretrained(options["base_model_name_or_path"], num_labels=1)
        found = PeftModel.from_pretrained(base, out[role])
        found.merge_and_unload().save_pretrained(tmp_path / f"{role}_merged")
        merged = FSDPEngine(ModelSpec(path=str(tmp_path / f"{role}_merged")), head=HEADS[role])
        torch.testing.assert_close(merged.give_weights(), watch.weights[role], rtol=0, atol=1e-6)


def test_adapters_and_a_merged_model_do_not_share_a_directory(
    learned: tuple[Watch, Path], tmp_path: Path
) -> None:
    """Transformers would load the model with the adapters, which it has already, or those of another run."""
    whole, adapters = [str(learned[1] / "last.ckpt"), str(tmp_path / "out"), "actor"], ["--adapters"]
    for first, second, held in ((whole, whole + adapters, "a model"), (whole + adapters, whole, "adapters")):
        export.run(first)
        export.run(first)
        before = sorted(file.name for file in (tmp_path / "out").iterdir())
        with pytest.raises(ValueError, match=rf"out: holds {held} \(\w+\.json\).*Type another directory"):
            export.run(second)
        assert sorted(file.name for file in (tmp_path / "out").iterdir()) == before
        shutil.rmtree(tmp_path / "out")


def test_adapters_of_the_embedded_model_name_its_directory(tmp_path: Path) -> None:
    FSDPEngine(ModelSpec(lora=LoRA(rank=1))).export_adapters(tmp_path)
    options = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (Path(options["base_model_name_or_path"]) / "config.json").is_file()


def test_what_has_no_adapters_is_not_exported_as_such(path: str, tmp_path: Path) -> None:
    plain = PPO(actor=Actor(path=path), reward=Reward(functions={"length": 1.0}))
    fit(plain, tmp_path, steps=1)
    with pytest.raises(ValueError, match=r"actor was trained without lora\. Leave --adapters out"):
        export.run([str(tmp_path / "last.ckpt"), str(tmp_path / "out"), "--adapters"])
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_other_adapters_is_refused_before_anything_is_built(
    learned: tuple[Watch, Path], path: str
) -> None:
    other = Actor(path=path, lora=LoRA(rank=4, alpha=1.0))
    with pytest.raises(ValueError, match=r"was trained with lora=LoRA\(rank=4, alpha=32.0"):
        other.check_checkpoint(learned[1] / "last.ckpt" / "actor")


@pytest.mark.parametrize("command", ["validate", "predict"])
def test_adapters_on_another_base_model_are_warned_of(
    command: str, learned: tuple[Watch, Path], path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not of another reference, which changes none of their weights."""
    other = str(shutil.copytree(path, tmp_path / "other"))
    data = TaskData(batch_size=6, num_rows=6, num_val_rows=6)
    for base, warned in ((path, []), (other, ["actor", "critic"])):
        run = pl.Trainer(strategy=Local(), accelerator="cpu", logger=False, default_root_dir=tmp_path)
        caplog.clear()
        algorithm = ppo(base, reference=Reference(path=other))
        getattr(run, command)(algorithm, datamodule=data, ckpt_path=learned[1] / "last.ckpt")
        said = re.findall(r"its (\w+) began with (\S+), and this run's with (\S+)\. ", caplog.text)
        assert said == [(role, path, other) for role in warned]


@pytest.mark.parametrize("engine", ["megatron", "zero"])
def test_other_engines_train_no_adapters(path: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_lightning.engines.ZeRO.require", lambda _: None)
    settings = Settings(engine=engine)  # type: ignore[arg-type]
    said = f"actor.lora with strategy.settings.engine={engine}: only the FSDP"
    with pytest.raises(ValueError, match=said), naming_role("actor"):
        Actor(path=path, lora=LoRA()).check_layout(LAYOUT, settings)


def test_what_is_not_trained_has_no_adapters(path: str) -> None:
    said = r"reference.lora: this model is not trained. Leave it out."
    with pytest.raises(ValueError, match=said), naming_role("reference"):
        Reference(path=path, lora=LoRA()).check_layout(LAYOUT, Settings())
    actor = Actor(path=path, lora=LoRA())
    actor.check_layout(LAYOUT, Settings())
    Generator.of(actor).check_layout(LAYOUT, Settings())


def test_peft_is_asked_for_before_anything_starts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("rlhf_lightning.extras.import_module", missing)
    with pytest.raises(ValueError, match=r"lora needs the module 'peft', .* 'rlhf-lightning\[lora\]'"):
        Actor(path=path, lora=LoRA()).check_layout(LAYOUT, Settings())


def test_copies_that_do_not_divide_the_ranks_are_refused(path: str) -> None:
    settings = Settings(train=FSDP(shard=3))
    with pytest.raises(ValueError, match=r"^strategy.settings.train.shard=3 on 2 ranks"):
        Actor(path=path).check_layout(LAYOUT, settings)
    Actor(path=path).check_layout(ParallelLayout(d=1), settings)
    Actor(path=path).check_layout(LAYOUT, replace(settings, engine="megatron"))
