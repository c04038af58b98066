"""Models that begin with adapters from a directory, as peft or `rlhf export --adapters` has written it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_lightning.engines import FSDPEngine, Head, check_adapters
from rlhf_lightning.engines.huggingface.adapters import saved_lora
from rlhf_lightning.parallel import ParallelLayout
from rlhf_lightning.spec import LoRA, ModelSpec
from rlhf_lightning.workers import Actor, Settings
from tests.ranks.test_adapters import LORA, adapted, outputs
from tests.unit import spmd
from tests.unit.engines import tiny
from tests.unit.engines.tiny import masters, step

OPTIONS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def learned(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Head, FSDPEngine]:
    """Two adapted models that have learned, the critic's head too."""
    engines: dict[Head, FSDPEngine] = {
        "lm": FSDPEngine(adapted(paths["lm"])),
        "scalar": FSDPEngine(adapted(paths["lm"]), head="scalar"),
    }
    for engine in engines.values():
        step(engine)
        step(engine)
    return engines


@pytest.fixture(scope="module")
def written(learned: dict[Head, FSDPEngine], tmp_path_factory: pytest.TempPathFactory) -> dict[Head, Path]:
    found: dict[Head, Path] = {head: tmp_path_factory.mktemp(head) for head in learned}
    for head, directory in found.items():
        learned[head].export_adapters(directory)
    return found


def begun(paths: dict[str, Path], directory: Path, *, lora: LoRA = LORA) -> ModelSpec:
    """The same base model, with another seed."""
    return replace(adapted(paths["lm"], lora=replace(lora, path=str(directory))), init_seed=9)


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_a_model_begins_with_what_another_has_learned(
    learned: dict[Head, FSDPEngine], written: dict[Head, Path], paths: dict[str, Path], head: Head
) -> None:
    engine = FSDPEngine(begun(paths, written[head]), head=head)
    expected = masters(learned[head])
    assert masters(engine).keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in masters(engine).items())
    name = "log_probs" if head == "lm" else "values"
    assert torch.equal(outputs(engine)[name], outputs(learned[head])[name])
    fresh = FSDPEngine(adapted(paths["lm"]), head=head)
    assert float((outputs(fresh)[name] - outputs(engine)[name]).abs().max()) > 1e-3
    step(engine)
    assert not torch.equal(outputs(engine)[name], outputs(learned[head])[name])


def on_ranks(group: dist.ProcessGroup, spec: ModelSpec) -> dict[str, Tensor]:
    return masters(FSDPEngine(spec, group=group))


def test_shards_begin_with_the_adapters_of_a_directory(
    learned: dict[Head, FSDPEngine], written: dict[Head, Path], paths: dict[str, Path]
) -> None:
    for found in spmd.run(2, on_ranks, begun(paths, written["lm"])):
        assert all(torch.equal(found[name], weight) for name, weight in masters(learned["lm"]).items())


def test_a_critic_that_begins_with_adapters_of_a_policy_has_a_fresh_head(
    learned: dict[Head, FSDPEngine], written: dict[Head, Path], paths: dict[str, Path]
) -> None:
    spec = begun(paths, written["lm"])
    found = masters(FSDPEngine(spec, head="scalar"))
    fresh = masters(FSDPEngine(replace(spec, lora=LORA), head="scalar"))
    assert torch.equal(found.pop("score.weight"), fresh["score.weight"])
    assert all(torch.equal(weight, masters(learned["lm"])[name]) for name, weight in found.items())


def test_a_policy_takes_no_adapters_of_a_critic(written: dict[Head, Path], paths: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"score\.weight is \(1, 64\) there and missing in this model"):
        check_adapters(begun(paths, written["scalar"]), "lm")


def by_peft(base: Path, directory: Path, *, layers: list[str]) -> peft.PeftModel:
    """Adapters that peft makes and writes, with values."""
    model = AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", target_modules=layers)
    found = peft.PeftModel(model, config)
    for name, parameter in found.named_parameters():
        if "lora" in name:
            draws = torch.Generator().manual_seed(len(name))
            torch.nn.init.normal_(parameter.data, std=0.3, generator=draws)
    found.save_pretrained(str(directory))
    return found


def test_what_peft_has_written_computes_what_peft_computes(paths: dict[str, Path], tmp_path: Path) -> None:
    theirs = by_peft(paths["lm"], tmp_path / "peft", layers=["q_proj", "down_proj"])
    spec = begun(paths, tmp_path / "peft", lora=replace(LORA, target_modules=("q_proj", "down_proj")))
    cast(Any, theirs).merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = FSDPEngine(tiny.spec(tmp_path / "merged"))
    found, plain = FSDPEngine(spec), FSDPEngine(tiny.spec(paths["lm"]))
    torch.testing.assert_close(outputs(found)["log_probs"], outputs(merged)["log_probs"], atol=1e-5, rtol=0)
    assert float((outputs(plain)["log_probs"] - outputs(found)["log_probs"]).abs().max()) > 0.1


def edited(directory: Path, **options: object) -> None:
    file = directory / OPTIONS
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


def without(directory: Path, part: str) -> None:
    tensors = load_file(directory / WEIGHTS)
    save_file({name: value for name, value in tensors.items() if part not in name}, directory / WEIGHTS)


def of_another_family(directory: Path) -> None:
    base = directory / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "qwen2"}')
    edited(directory, base_model_name_or_path=str(base))


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (shutil.rmtree, "there is no adapter_config.json. Type a directory of adapters, as peft's"),
    "options alone": (lambda at: (at / WEIGHTS).unlink(), "there is no adapter_model.safetensors. Type a"),
    "another rank": (
        lambda at: edited(at, r=8),
        "have rank 8, alpha 6.0 and .* lora has rank 3, .* lora.rank 8,",
    ),
    "another alpha": (
        lambda at: edited(at, lora_alpha=12),
        "alpha 12 .* has rank 3, alpha 6 .* lora.alpha 12 ",
    ),
    "other layers": (
        lambda at: without(at, "mlp"),
        r"layers k_proj, o_proj, q_proj, v_proj; .* lora.target_modules \[k_proj,o_proj,q_proj,v_proj\]",
    ),
    "a layer less": (
        lambda at: without(at, "layers.1.mlp.up_proj"),
        r"layers\.1\.mlp\.up_proj\.lora_A\.weight is missing there and \(3, 64\) in this model",
    ),
    "another kind": (lambda at: edited(at, peft_type="IA3"), "of the kind IA3, not LORA. Merge them into"),
    "another scale": (lambda at: edited(at, use_rslora=True), "have use_rslora=True, and here they are W"),
    "layers again": (lambda at: edited(at, layer_replication=[[0, 1]]), "have layer_replication=.*Merge"),
    "several ranks": (lambda at: edited(at, rank_pattern={"q": 1}), "have rank_pattern={'q': 1}, and here"),
    "another base": (
        lambda at: edited(at, init_lora_weights="pissa_niter_4"),
        "have init_lora_weights=pissa_niter_4, which changed the weights of their base model too, .* Merge",
    ),
    "another family": (of_another_family, r"of .*base, a model of type qwen2, and this is a llama\."),
    "a torn file": (
        lambda at: (at / WEIGHTS).write_bytes((at / WEIGHTS).read_bytes()[:-9]),
        "is truncated or corrupt",
    ),
}


VARIANTS: dict[str, object] = {
    "lora_bias": True,
    "kasa_config": {"beta": 1e-4},
    "use_bdlora": {"nblocks": 2},
    "trainable_token_indices": [3],
    "target_parameters": ["up_proj"],
    "alora_invocation_tokens": [5, 6],
    "use_qalora": True,
}
"""Options of peft that make other adapters, of the same names and shapes or of others."""
UNMERGED = ("alora_invocation_tokens", "use_qalora")


@pytest.mark.parametrize("name", SPOILT)
def test_other_adapters_are_refused_before_anything_starts(
    name: str, written: dict[Head, Path], paths: dict[str, Path], tmp_path: Path
) -> None:
    at = tmp_path / "copy"
    shutil.copytree(written["lm"], at)
    actor = Actor(path=str(paths["lm"]), lora=replace(LORA, path=str(at)))
    actor.check_layout(ParallelLayout(), Settings())
    spoil, message = SPOILT[name]
    spoil(at)
    with pytest.raises(ValueError, match=message):
        actor.check_layout(ParallelLayout(), Settings())


@pytest.mark.parametrize("option", VARIANTS)
def test_variants_are_refused_with_what_can_be_done_about_them(
    option: str, written: dict[Head, Path], paths: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(written["lm"], tmp_path / "copy")
    edited(tmp_path / "copy", **{option: VARIANTS[option]})
    advice = "They cannot be merged either: type plain ones" if option in UNMERGED else "Merge them into"
    said = re.escape(f"have {option}={VARIANTS[option]}, and here they are W + alpha / rank B A of linear")
    with pytest.raises(ValueError, match=f"{said} .* for all tokens. {advice}"):
        check_adapters(begun(paths, tmp_path / "copy"), "lm")


@pytest.mark.parametrize("kind", ["pissa", "olora", "gaussian", "orthogonal"])
def test_those_that_begin_with_other_weights_of_the_base_are_refused(
    kind: str, paths: dict[str, Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(paths["lm"])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    options: Any = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "init_lora_weights": kind}
    theirs: Any = peft.PeftModel(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    theirs.save_pretrained(str(tmp_path))
    base = theirs.unload().state_dict()
    changed = any(not torch.equal(weight, before[name]) for name, weight in base.items())
    assert changed == (kind in {"pissa", "olora"})
    lora = LoRA(rank=4, alpha=6, target_modules=("q_proj",), path=str(tmp_path))
    refused = pytest.raises(ValueError, match=f"have init_lora_weights={kind}, which") if changed else None
    with refused or nullcontext():
        check_adapters(ModelSpec(path=str(paths["lm"]), lora=lora), "lm")


def test_those_for_a_model_of_the_hub_are_looked_at_too(written: dict[Head, Path]) -> None:
    spec = ModelSpec(path="some/model", lora=replace(LORA, path=str(written["lm"])))
    check_adapters(spec, "lm")
    with pytest.raises(ValueError, match=re.escape("lora has rank 2, alpha 6. Type lora.rank 3")):
        check_adapters(replace(spec, lora=replace(spec.lora or LORA, rank=2)), "lm")


def test_a_checkpoint_does_not_depend_on_where_its_run_began(
    written: dict[Head, Path], paths: dict[str, Path], tmp_path: Path
) -> None:
    engine = FSDPEngine(begun(paths, written["lm"]))
    step(engine)
    engine.save(tmp_path)
    saved = saved_lora(tmp_path)
    assert saved == LORA
    assert saved.path == "", "an export looks for nothing there"
    again = FSDPEngine(adapted(paths["lm"]))
    again.load(tmp_path)
    assert all(torch.equal(weight, masters(engine)[name]) for name, weight in masters(again).items())


def test_devices_are_told_the_whole_path(
    written: dict[Head, Path], paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written["lm"].parent)
    lora = Actor(path=str(paths["lm"]), lora=replace(LORA, path=written["lm"].name)).located().lora
    assert lora is not None
    assert lora.path == str(written["lm"])
