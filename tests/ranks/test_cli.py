"""Wrong input is refused before any worker starts, with one message that says what to type instead."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rlhf_lightning import __version__, checkpoint
from rlhf_lightning.algos import PPO
from rlhf_lightning.controller import cluster, connection
from rlhf_lightning.engines import FSDPEngine, Head
from rlhf_lightning.spec import EMBEDDED_DIRECTORY, ModelSpec
from tests.unit.rlhf import FIT, SHORT, Rlhf

pytestmark = pytest.mark.usefixtures("in_own_directory")
SLACK_S = 5.0
"""What a busy machine takes at most beside a wait."""
MAP = ("map", "--algo", "ppo", "--model", "llama-7b", "--devices", "8")
QUESTIONS = (*FIT, "--data", "promptdata", "--data.path", "rows.jsonl", "--data.prompt_field", "question")


def write_rows(*broken: str, count: int = 40) -> None:
    rows = [json.dumps({"question": f"What is {n} + {n}?", "answer": str(2 * n)}) for n in range(count)]
    Path("rows.jsonl").write_text("\n".join([*rows[:4], *broken, *rows[4:]]) + "\n", encoding="utf-8")


def copy_model(*, without: str = "") -> Path:
    model = Path("model")
    shutil.copytree(EMBEDDED_DIRECTORY, model, ignore=shutil.ignore_patterns(without))
    return model


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("fit", "--algo", "pppo"),
            ("--algo pppo", "gspo, kto, onlinedpo, opo, ppo", "my_package.my_module.Mine"),
        ),
        (
            (*FIT, "--strategy", "splitt"),
            ("--strategy splitt", "nemo-aligner, one-step-off, openrlhf, pipelined, split, standalone"),
        ),
        ((*FIT, "--data", "promtdata"), ("--data promtdata", "promptdata")),
        (("fit", "--algo", "nowhere.Mine"), ("nowhere.Mine", "No module named 'nowhere'")),
        (
            ("fit", "--algo", "json.JSONDecoder"),
            ("json.JSONDecoder is not a subclass of RLHFAlgorithm. Type the import path",),
        ),
        ((*FIT, "--algo.gama", "1"), ("PPO", "'gama'", "Did you mean gamma?")),
        ((*FIT, "--algo.actor.optimizer.rate", "1"), ("optimizer.rate", "OptimizerSpec has: lr, betas")),
        ((*FIT, "--strategy.device", "1"), ("Colocated", "'device'", "Did you mean devices?")),
        ((*FIT, "--data.batchsize", "8"), ("TaskData", "'batchsize'", "Did you mean batch_size?")),
        ((*FIT, "--trainer.max_step", "1"), ("--trainer.max_step", "Did you mean max_steps?")),
        ((*FIT, "--bogus", "1"), ("--bogus", "--help")),
        (("fit", "--algo.actor.help"), ("of which class?", "--algo.help NAME --algo.actor.help")),
        ((*FIT, "--algo.gamma", "high"), ("gamma", "float", "high")),
        ((*FIT, "--algo.actor.sampling.top_p", "2"), ("sampling.top_p=2.0", "(0, 1]")),
        ((*FIT, "--algo.actor.optimizer.lr", "-1e-6"), ("optimizer.lr=-1e-06: a learning rate is not",)),
        ((*FIT, "--trainer.max_steps", "-5"), ("max_steps", "-5")),
        ((*FIT, "--trainer.callbacks", "Nope"), ("trainer.callbacks", "Nope")),
        ((*FIT, "--data", "promptdata"), ("PromptData", "required: path")),
        (("fit", "--data", "taskdata"), ("required: --algo NAME",)),
        (("fit", "-c", "nowhere.yaml"), ("-c nowhere.yaml", "cannot be read")),
        (("fitt",), ("'fitt' is not a command", "fit, validate, predict, export, map, calibrate, reshard")),
        ((), ("no command was typed. Choose from fit,",)),
        (("fit", "grpo"), ("grpo. Did you mean --algo grpo?",)),
        (("fit", "--algo.help"), ("--algo.help: which one? Type --algo.help NAME: cispo, ",)),
        (("export",), ("arguments are required: CHECKPOINT, OUT. Try --help.",)),
        (("export", "nowhere.ckpt", "out"), ("'nowhere.ckpt' is not there",)),
        (
            ("map", "--algo", "json.dumps", "--model", "llama-7b"),
            ("--algo json.dumps: is not an RLHFAlgorithm",),
        ),
        ((*MAP, "--yaml", "nowhere/x.yaml"), ("--yaml nowhere/x.yaml: there is no directory nowhere",)),
        ((*MAP, "--picture", "."), ("--picture .: is a directory",)),
        ((*MAP, "--picture", "x.xyz"), ("x.xyz: a picture ends in .png, .svg, .pdf. Try x.png or .svg",)),
        ((*MAP, "--real-prompt", "-1"), ("--real-prompt -1: must lie between 0 and --prompt 1024.",)),
        ((*FIT, "--trainer.val_check_interval", "0"), ("val_check_interval=0", "limit_val_batches=0")),
        ((*FIT, "--trainer.check_val_every_n_epoch", "0"), ("check_val_every_n_epoch=0",)),
    ],
    ids=lambda value: " ".join(value[-2:]) if value and isinstance(value, tuple) else "",
)
def test_a_word_that_nobody_knows(rlhf: Rlhf, words: tuple[str, ...], said: tuple[str, ...]) -> None:
    message = rlhf.refused(*words)
    assert [part for part in said if part not in message] == [], message
    assert len(message) < 400


def test_an_unknown_key_in_a_configuration(rlhf: Rlhf) -> None:
    Path("mine.yaml").write_text("algo: ppo\ndata: taskdata\ntrainer: {max_step: 3}\n", encoding="utf-8")
    assert "does not accept option 'trainer.max_step'. Did you mean max_steps?" in rlhf.refused(
        "fit", "-c", "mine.yaml"
    )


def test_options_beside_a_class_in_a_configuration(rlhf: Rlhf) -> None:
    Path("mine.yaml").write_text("algo: {class_path: grpo, group_size: 4}\n", encoding="utf-8")
    assert "-c mine.yaml: algo: group_size: write options of a class under init_args" in rlhf.refused(
        "fit", "-c", "mine.yaml"
    )


def test_a_file_in_place_of_the_kind_of_data(rlhf: Rlhf) -> None:
    write_rows()
    said = "--data rows.jsonl: is a file. Type the kind too: --data promptdata --data.path rows.jsonl"
    assert rlhf.refused(*FIT, "--data", "rows.jsonl") == said


def test_a_data_file_that_is_not_there(rlhf: Rlhf) -> None:
    write_rows()
    message = rlhf.refused(*FIT, "--data", "promptdata", "--data.path", "row.jsonl")
    assert "data.path=row.jsonl: no such file" in message
    assert "Did you mean rows.jsonl?" in message


def test_a_row_without_the_prompt_field(rlhf: Rlhf) -> None:
    write_rows('{"quest": "What?", "answer": "1"}')
    message = rlhf.refused(*QUESTIONS)
    assert "data.prompt_field=question: rows.jsonl, row 5 has no such field; it has: quest" in message


def test_more_rows_a_batch_than_there_are(rlhf: Rlhf) -> None:
    write_rows(count=20)
    message = rlhf.refused(*QUESTIONS)
    assert "data.batch_size=32: rows.jsonl has only 20 rows" in message
    assert "Try --data.batch_size 20" in message


def test_a_model_without_a_config(rlhf: Rlhf) -> None:
    copy_model(without="config.json")
    assert "model: has no config.json" in rlhf.refused(*FIT, *SHORT, "--algo.actor.path", "model")


def test_a_truncated_weight_file(rlhf: Rlhf) -> None:
    file = copy_model() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    message = rlhf.refused(*FIT, *SHORT, "--algo.actor.path", "model")
    assert re.search(r"model\.safetensors: is truncated or corrupt \(.*file not fully covered", message)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("colocated devices 0", "strategy.devices=0: a job needs at least 1 device"),
        (
            "hybrid3d parallel.t 4 parallel.generate.t 3",
            "generate t=3): generate t must divide train t. Try generate t=1 or 2 or 4",
        ),
        (
            'hybrid3d parallel.roles {"judge":{"t":2}}',
            "HybridEngine3D(parallel.roles=['judge']): the algorithm has no such role",
        ),
    ],
)
def test_a_placement_that_cannot_be(rlhf: Rlhf, words: str, said: str) -> None:
    # The data file is missing too: the placement is refused before anything is read.
    lost = ("--data", "promptdata", "--data.path", "nowhere.jsonl")
    strategy, *others = words.split()
    options = [word if i % 2 else f"--strategy.{word}" for i, word in enumerate(others)]
    assert said in rlhf.refused(*FIT, *lost, "--strategy", strategy, *options)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize("listens", [False, True])
def test_a_cluster_that_does_not_answer(
    rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, silent_port: int, listens: bool
) -> None:
    waited = list[float]()

    def check_address(*given: str) -> None:
        started = time.monotonic()
        try:
            connection.check_address(*given)
        finally:
            waited.append(time.monotonic() - started)

    monkeypatch.setattr(connection, "ANSWER_S", 1.0)
    monkeypatch.setattr(cluster, "check_address", check_address)
    address = f"127.0.0.1:{silent_port if listens else free_port()}"
    lost = ("--data", "promptdata", "--data.path", "nowhere.jsonl")
    message = rlhf.refused(*FIT, *lost, "--strategy.address", address)
    assert f"strategy.address='{address}': no Ray cluster answers there" in message
    assert "ray start --head" in message
    assert max(waited) < 1 + SLACK_S


def test_the_address_in_the_environment_is_tried_too(rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    message = rlhf.refused(*FIT, *SHORT)
    assert message.startswith("RAY_ADDRESS='http://127.0.0.1:8265': write host:port")
    assert message.endswith("or type --strategy.address local to use this machine.")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("None", "my_rewards.score: returned None, of type NoneType, the first with"),
        ("[0.0, float('nan'), 0.0]", "row 1 of the batch got nan, which is not a finite number; its prompt"),
        ("[row['solution'] for row in rows]", "KeyError over 3 rows"),
    ],
)
def test_a_reward_function_that_does_not_work(
    rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    Path("my_rewards.py").write_text(f"def score(prompts, responses, rows):\n    return {body}\n", "utf-8")
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    message = rlhf.refused(*FIT, *SHORT, "--algo.reward.functions", "my_rewards.score")
    assert said in message
    assert "'Sort " in message


def test_more_tokens_than_the_model_has_positions(rlhf: Rlhf) -> None:
    message = rlhf.refused(*FIT, *SHORT, "--algo.actor.sampling.max_new_tokens", "510")
    assert "sampling.max_new_tokens=510: with the longest prompt, 13 tokens, that makes 523" in message
    assert "has 512 positions. Try sampling.max_new_tokens=499" in message


def test_a_checkpoint_of_another_model(rlhf: Rlhf) -> None:
    model = copy_model(without="*.safetensors")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 64}), encoding="utf-8")
    other = Path("other.ckpt")
    heads: dict[str, Head] = {"actor": "lm", "critic": "scalar"}
    for name, head in heads.items():
        FSDPEngine(ModelSpec(path=str(model)), head=head).save(other / name)
    checkpoint.write_state(other, {"state_dict": {}, "loops": {}, "callbacks": {}, "optimizer_states": {}})
    message = rlhf.refused(*FIT, *SHORT, "--ckpt_path", "other.ckpt")
    assert (
        "other.ckpt/actor: is of another model: model.model.embed_tokens.weight has shape [264, 128]"
        in message
    )
    assert "[264, 64]" in message


def test_a_checkpoint_that_is_not_there(rlhf: Rlhf) -> None:
    assert "'nowhere.ckpt' is not there" in rlhf.refused(*FIT, *SHORT, "--ckpt_path", "nowhere.ckpt")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--version",), (f"rlhf {__version__}",)),
        (("--help",), ("usage: rlhf ", "rlhf fit --algo ppo", "rlhf export", "rlhf map", "rlhf calibrate")),
        (("-h",), ("fit Train.", "predict Answer the prompts; the answers go to <root>/predictions.jsonl.")),
        (("predict", "--help"), ("Answer the prompts; the answers go to <root>/predictions.jsonl.",)),
        (("fit", "--help"), ("rlhf_lightning.data.PromptData", "rlhf_lightning.data.PreferenceData")),
        (("fit", "--algo.help", "ppo"), ("PPO", "--algo.kl", "--algo.actor")),
        (("fit", "--strategy.help=split"), ("--strategy.actor_devices",)),
        (("fit", "--algo", "grpo", "--algo.actor.help"), ("--algo.actor.sampling.max_new_tokens",)),
        (("fit", "--algo.actor.sampling.help", "--algo=dapo"), ("--algo.actor.sampling.top_p",)),
        (("fit", "--strategy.help", "split", "--strategy.settings.help"), ("--strategy.settings.engine",)),
        (("map", "--help"), ("usage: rlhf map", "--hardware")),
        (("export", "--help"), ("CHECKPOINT OUT [ROLE]", "a Hugging Face directory", "only the adapters")),
    ],
    ids=" ".join,
)
def test_help(rlhf: Rlhf, words: tuple[str, ...], said: tuple[str, ...]) -> None:
    out = rlhf.succeeds(*words)
    assert [part for part in said if part not in " ".join(out.split())] == [], out


def test_what_is_right_is_not_refused(rlhf: Rlhf) -> None:
    out = rlhf.succeeds(*FIT, "--strategy", "split", "--print_config")
    assert "class_path: rlhf_lightning.strategies.Split" in out
    with pytest.raises(AssertionError, match="started Ray"):
        rlhf.run(*FIT, *SHORT)


def test_prompts_without_an_answer_are_answered(rlhf: Rlhf) -> None:
    Path("new.jsonl").write_text('{"prompt": "Sort 21: "}\n{"prompt": "Sort 53: "}\n', encoding="utf-8")
    words = ("predict", "--algo", "ppo", "--data", "promptdata", "--data.path", "new.jsonl")
    short = ("--strategy", "local", "--trainer.default_root_dir", ".", "--trainer.logger", "false")
    rlhf.succeeds(*words, *short, "--algo.actor.sampling.max_new_tokens", "2", "--trace", "out.json")
    lines = [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["Sort 21: ", "Sort 53: "]
    assert all(line["truncated"] for line in lines)
    for few, value, said in (
        ("fast_dev_run", "true", "not kept with fast_dev_run"),
        ("limit_predict_batches", "0", "of no prompt"),
    ):
        out = rlhf.succeeds(*words, *short, f"--trainer.{few}", value)
        assert f"predictions: {said}" in out
        assert len(Path("predictions.jsonl").read_text().splitlines()) == 2
    calls = [event["name"] for event in json.loads(Path("out.json").read_text())["traceEvents"]]
    assert "actor.generate_sequences" in calls


def test_what_a_predict_step_of_ones_own_gives_is_written(
    rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(self: PPO, batch: Mapping[str, object], batch_idx: int) -> dict[str, list[object]]:
        return {"prompts": ["a", "b"], "responses": [batch_idx, 7]}

    monkeypatch.setattr(PPO, "predict_step", first, raising=False)
    words = ("predict", "--algo", "ppo", "--strategy", "local", "--data.num_val_rows", "2")
    rlhf.succeeds(*words, "--trainer.default_root_dir", ".", "--trainer.logger", "false")
    lines = [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]
    assert lines == [{"prompt": "a", "response": 0}, {"prompt": "b", "response": 7}]
    for given, named in (([7], "list"), (None, "NoneType"), ({"scores": [7]}, r"\['scores'\]")):
        monkeypatch.setattr(PPO, "predict_step", lambda *_, given=given: given)
        said = rlhf.refused(*words, "--trainer.default_root_dir", ".", "--trainer.logger", "false")
        assert re.match(rf"PPO\.predict_step returned {named}\. Return lists by name, of prompts, ", said), (
            said
        )
        assert Path("predictions.jsonl").read_text().count("\n") == 2, "those of before"


def test_a_validation_leaves_a_trace_too(rlhf: Rlhf, caplog: pytest.LogCaptureFixture) -> None:
    short = ("--strategy", "local", "--trainer.default_root_dir", ".")
    words = ("--algo.actor.sampling.max_new_tokens", "2", "--trace", "out.json")
    caplog.set_level("INFO", "lightning.pytorch")
    rlhf.succeeds("validate", "--algo", "ppo", *SHORT, *short, *words)
    assert "engine fsdp, generator native, float32\n  0: actor d1" in caplog.text
    assert "GPU available" not in caplog.text, "of the controller, which needs none"
    assert "seamless cloud" not in caplog.text, "what it advertises"
    calls = [event["name"] for event in json.loads(Path("out.json").read_text())["traceEvents"]]
    assert {"actor.generate_sequences", "reward.compute_reward"} <= set(calls)


def test_a_prediction_is_what_a_reward_function_reads(rlhf: Rlhf) -> None:
    """Each answer of the embedded model to the task ends, as the end token says, which is no part of it."""
    words = ("predict", "--algo", "ppo", "--strategy", "local", "--data.num_val_rows", "4")
    rlhf.succeeds(*words, "--trainer.default_root_dir", ".", "--trainer.logger", "false")
    lines = [json.loads(line) for line in Path("predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert list(line) == ["prompt", "response", "truncated"]
        assert line["truncated"] == (len(line["response"]) >= 8)
        assert "<" not in line["response"]
    assert not all(line["truncated"] for line in lines)
