"""The engine on one device against plain transformers with padding."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from rlhf_lightning.engines import FSDP, FSDPEngine, Head
from rlhf_lightning.engines.head import Asked
from rlhf_lightning.workers import Reference
from tests.unit.engines import tiny
from tests.unit.engines.tiny import Fit, gradients

# float32 sums of some hundred terms in another order: a few of 2^-24.
SAME = 1e-6

BUDGETS = {"one row": 1, "two rows": 2 * tiny.LONGEST, "all": 1000}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("head", "model"), [("lm", "lm"), ("lm", "tied"), ("scalar", "scalar")])
def test_loss_and_gradients_are_those_of_padded_transformers(
    paths: dict[str, Path], head: Head, model: str, budget: str
) -> None:
    expected = tiny.expect(paths[model], head=head, temperature=0.7)
    config = FSDP(max_tokens_per_micro_batch=BUDGETS[budget])
    engine = FSDPEngine(tiny.spec(paths[model]), head=head, config=config)
    metrics = engine.accumulate(tiny.rows(), Fit(), tiny.counts(), temperature=0.7)
    assert float(metrics["test/loss"]) == pytest.approx(expected.loss, rel=SAME)
    assert int(metrics["test/tokens"]) == tiny.counts().tokens
    found = gradients(engine)
    assert tiny.distance(found, expected.gradients) < SAME
    assert all(tiny.distance({n: g}, {n: expected.gradients[n]}) < 10 * SAME for n, g in found.items())


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("head", "temperature"), [("lm", 1.0), ("lm", 0.5), ("scalar", 1.0)])
def test_outputs_come_in_row_order_and_are_0_where_masked(
    paths: dict[str, Path], head: Head, temperature: float, budget: str
) -> None:
    expected = tiny.expect(paths[head], head=head, temperature=temperature)
    config = FSDP(max_tokens_per_micro_batch=BUDGETS[budget])
    found = FSDPEngine(tiny.spec(paths[head]), head=head, config=config).infer(
        tiny.rows(), temperature=temperature, asked=Asked(entropy=True)
    )
    assert set(found.keys()) == set(expected.outputs)
    for name, values in expected.outputs.items():
        torch.testing.assert_close(found[name], values, atol=1e-5, rtol=1e-5)
        assert found[name].dtype == torch.float32
        assert (found[name][~tiny.rows()["response_mask"]] == 0).all()


@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_no_pass_keeps_keys_and_values(
    paths: dict[str, Path], head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later token reads them, and those of all layers would wait for the last."""
    monkeypatch.setattr("transformers.cache_utils.Cache.update", lambda *_, **__: pytest.fail("they are"))
    FSDPEngine(tiny.spec(paths[head]), head=head).infer(tiny.rows(), temperature=1.0)


def test_greedy_counts_as_temperature_1(paths: dict[str, Path]) -> None:
    engine = FSDPEngine(tiny.spec(paths["lm"]))
    greedy, plain = (engine.infer(tiny.rows(), temperature=t)["log_probs"] for t in (0.0, 1.0))
    assert torch.equal(greedy, plain)


def test_a_reward_is_read_at_the_token_itself(paths: dict[str, Path]) -> None:
    rows = tiny.rows()
    after = FSDPEngine(tiny.spec(paths["scalar"]), head="reward").infer(rows, temperature=1.0)["values"]
    before = FSDPEngine(tiny.spec(paths["scalar"]), head="scalar").infer(rows, temperature=1.0)["values"]
    # Row 1 is valid throughout: what is said after a token is what is said before the next.
    torch.testing.assert_close(after[1, :-1], before[1, 1:])


def test_nothing_is_computed_for_rows_without_a_valid_token(paths: dict[str, Path]) -> None:
    engine = FSDPEngine(tiny.spec(paths["lm"]))
    masked = tiny.rows()[2:3]
    assert (engine.infer(masked, temperature=1.0)["log_probs"] == 0).all()
    metrics = engine.accumulate(masked, Fit(), tiny.counts(), temperature=1.0)
    assert float(metrics["test/loss"]) == 0
    assert all((gradient == 0).all() for gradient in gradients(engine).values())
    assert engine.infer(tiny.rows()[:0], temperature=1.0)["log_probs"].shape == (0, tiny.RESPONSE)


def test_padding_is_never_read(paths: dict[str, Path]) -> None:
    rows, noise = tiny.rows(), tiny.rows()
    noise["prompt_ids"][~noise["prompt_mask"]] = 7
    unread = torch.tensor([[place >= digits.rfind("1") + 1 for place in range(6)] for digits in tiny.MASKS])
    noise["response_ids"][unread] = 7
    engine = FSDPEngine(tiny.spec(paths["lm"]))
    first, second = (engine.infer(r, temperature=1.0)["log_probs"] for r in (rows, noise))
    assert torch.equal(first, second)


def test_entropy_costs_nothing_where_the_loss_does_not_ask(paths: dict[str, Path]) -> None:
    expected = tiny.expect(paths["lm"], head="lm", needs_entropy=False)
    engine = FSDPEngine(tiny.spec(paths["lm"]))
    metrics = engine.accumulate(tiny.rows(), Fit(needs_entropy=False), tiny.counts(), temperature=1.0)
    assert float(metrics["test/loss"]) == pytest.approx(expected.loss, rel=SAME)


def test_gradient_checkpointing_changes_nothing(paths: dict[str, Path]) -> None:
    plain = FSDPEngine(tiny.spec(paths["lm"]))
    thrifty = FSDPEngine(tiny.spec(paths["lm"], gradient_checkpointing=True))
    calls: dict[FSDPEngine, int] = {}
    for engine in (plain, thrifty):
        layer = engine._root.get_submodule("model.layers.0.mlp")
        layer.register_forward_pre_hook(
            lambda *_, engine=engine: calls.update({engine: calls.get(engine, 0) + 1})
        )
        engine.accumulate(tiny.rows(), Fit(), tiny.counts(), temperature=1.0)
    assert calls == {plain: 1, thrifty: 2}
    thrifty.infer(tiny.rows(), temperature=1.0)
    assert calls == {plain: 1, thrifty: 3}
    assert tiny.distance(gradients(thrifty), gradients(plain)) < SAME


def test_gradient_checkpointing_lets_no_router_draw(tmp_path: Path) -> None:
    path = tiny.write_experts(tmp_path)
    plain, thrifty = (FSDPEngine(tiny.spec(path, gradient_checkpointing=on)) for on in (False, True))
    routed, losses = Counter[FSDPEngine](), []
    for engine in (plain, thrifty):
        gate = engine._root.get_submodule("model.layers.0.mlp.gate")
        gate.register_forward_pre_hook(lambda *_, engine=engine: routed.update([engine]))
        metrics = engine.accumulate(tiny.rows(), Fit(), tiny.counts(), temperature=1.0)
        losses.append(float(metrics["test/loss"]))
    assert routed == {plain: 1, thrifty: 2}
    assert losses[1] == losses[0]
    assert tiny.distance(gradients(thrifty), gradients(plain)) < SAME
    assert not any(module.training for module in thrifty._root.modules())


def test_bfloat16_is_near_float32_and_keeps_float32_masters(paths: dict[str, Path]) -> None:
    exact = tiny.expect(paths["lm"], head="lm")
    engine = FSDPEngine(tiny.spec(paths["lm"], dtype="bfloat16"), config=FSDP(max_tokens_per_micro_batch=1))
    metrics = engine.accumulate(tiny.rows(), Fit(), tiny.counts(), temperature=1.0)
    # bfloat16 has 8 bits: 2^-9 relative a rounding, over some tens of roundings.
    assert float(metrics["test/loss"]) == pytest.approx(exact.loss, rel=3e-2)
    assert tiny.distance(gradients(engine), exact.gradients) < 3e-2
    assert {gradient.dtype for gradient in gradients(engine).values()} == {torch.float32}
    before = {name: p.detach().clone() for name, p in engine._weights.masters.items()}
    version = engine.version
    engine.optimizer_step()
    assert engine.version > version
    with engine.gathered() as module:
        for name, parameter in module.named_parameters():
            master = engine._weights.masters[name]
            assert master.dtype == torch.float32
            assert not torch.equal(master, before[name])
            assert torch.equal(parameter, master.bfloat16())
    masters = torch.cat([master.detach().flatten() for master in engine._weights.masters.values()])
    assert torch.equal(engine.give_weights(), masters)
    assert not len(engine.give_weights(wanted=False))


def test_weights_do_not_follow_the_file_that_they_were_read_from(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(paths["lm"], tmp_path / "model"))
    engine = FSDPEngine(tiny.spec(path))
    before = engine.give_weights()
    with (path / "model.safetensors").open("r+b") as file:
        file.write(bytes((path / "model.safetensors").stat().st_size))
    assert torch.equal(engine.give_weights(), before)


def test_a_model_that_nothing_trains_is_held_once(paths: dict[str, Path]) -> None:
    frozen = FSDPEngine(Reference(path=str(paths["lm"]), dtype="bfloat16"))
    trained = FSDPEngine(tiny.spec(paths["lm"], dtype="bfloat16"))
    count = len(trained.give_weights())
    assert frozen.memory() == {"parameters": 2 * count, "gradients": 0, "optimizer": 0, "host": 0}
    assert trained.memory()["parameters"] == 6 * count
    found, expected = (e.infer(tiny.rows(), temperature=1.0)["log_probs"] for e in (frozen, trained))
    assert torch.equal(found, expected)
    follows = FSDPEngine(Reference(path=str(paths["lm"]), dtype="bfloat16", decay=0.5))
    assert follows.memory()["parameters"] == 6 * count
    tiny.step(trained)
    follows.follow_weights(trained.give_weights(), decay=0.0)
    found, expected = (e.infer(tiny.rows(), temperature=1.0)["log_probs"] for e in (follows, trained))
    assert torch.equal(found, expected)


def test_a_missing_column_is_named(paths: dict[str, Path]) -> None:
    engine = FSDPEngine(tiny.spec(paths["lm"]))
    with pytest.raises(ValueError, match=r"no column 'advantages' among \['prompt_ids'"):
        engine.accumulate(tiny.rows().exclude("advantages"), Fit(), tiny.counts(), temperature=1.0)


def test_a_response_without_a_prompt_is_refused(paths: dict[str, Path]) -> None:
    rows = tiny.rows()
    rows["prompt_mask"][4] = False
    with pytest.raises(ValueError, match="has a response but no prompt"):
        FSDPEngine(tiny.spec(paths["lm"])).infer(rows, temperature=1.0)


@pytest.mark.parametrize(("devices", "fitting"), [(2, 4), (6, 4)])
def test_devices_that_layers_are_not_divided_over_are_refused(devices: int, fitting: int) -> None:
    said = rf"tensor=4: 4 does not divide the {devices} devices of actor\. Try {fitting} devices for it\."
    with pytest.raises(ValueError, match=said):
        FSDP(tensor=4).layout(devices, name="actor")


def test_a_budget_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_micro_batch=-1"):
        FSDP(max_tokens_per_micro_batch=-1)


def test_objects_in_the_rows_are_left_alone(paths: dict[str, Path]) -> None:
    rows = tiny.rows()
    rows.set_non_tensor("rows", [{"question": "?"}] * len(rows))
    engine = FSDPEngine(tiny.spec(paths["lm"]))
    found, right = (engine.infer(each, temperature=1.0)["log_probs"] for each in (rows, tiny.rows()))
    assert torch.equal(found, right)
