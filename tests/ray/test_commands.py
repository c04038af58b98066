"""Commands of README, configs and examples run as they are written, only shorter."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from rlhf_lightning.spec import EMBEDDED_DIRECTORY
from tests.conftest import ROOT
from tests.documents import commands
from tests.logged import tensorboard
from tests.ray.commands import exit_code, run
from tests.ray.model import write_tiny

FEW = "--trainer.max_steps 2 --data.batch_size 16"
SHORT = f"{FEW} --trainer.default_root_dir {{root}}"
FIRST = "rlhf fit --algo ppo --strategy colocated"
"""The README's first command, whose checkpoint `validate`, `predict` and `export` are tried on."""
EXAMPLES = {
    "ppo.py": "python examples/ppo.py",
    "custom_algorithm.py": f"rlhf fit --algo examples.custom_algorithm.Mine {SHORT}",
    "written_verdict.py": f"rlhf fit --algo examples.written_verdict.WrittenVerdict {SHORT}",
    "length_budget.py": "python examples/length_budget.py --steps 2 --out {root}",
    "distillation.py": "python examples/distillation.py --steps 2 --out {root}",
    "second_try.py": "python examples/second_try.py --steps 2 --out {root}",
    "embedded_sft.py": "python examples/embedded_sft.py --steps 2",
    "safe_alignment.py": "python examples/safe_alignment.py --dialogues dialogues.jsonl --out {root} --step 4"
    " --pairs 8 --held-out 4 --iterations 1 --response-tokens 32 --place '--strategy local'"
    """ --more "--strategy.settings.train '{{max_tokens_per_micro_batch: 4096}}'\"""",
    "prepare_gsm8k.py": "python examples/prepare_gsm8k.py --model stand-in --questions questions.jsonl",
}
"""How each example is run; what stands before the first option is in its docstring, or in the README."""
CONFIGS = {path.name: path.read_text().splitlines()[0] for path in sorted(ROOT.glob("configs/*.yaml"))}
"""The first line of each config, which holds its command."""
IN_README = [line for line in commands("README.md") if shlex.split(line)[0] in ("rlhf", "python")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, cluster: str, module_leaves_nothing: None) -> Path:
    """A directory with the configs and examples, and small files where the configs name large ones."""
    place = tmp_path_factory.mktemp("project")
    for folder in ("configs", "examples", "rlhf_lightning"):
        (place / folder).symlink_to(ROOT / folder)
    write_tiny(place / "stand-in")
    config = LlamaConfig.from_pretrained(place / "stand-in", max_position_embeddings=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(place / "stand-in")
    with (place / "questions.jsonl").open("w") as file:
        for number in range(64):
            sum_ = f"{number} + 7 = <<{number}+7={number + 7}>>{number + 7}"
            question = f"Tom has {number} apples and buys 7 more. How many has he?"
            file.write(
                json.dumps({"question": question, "answer": f"He has {sum_}.\n#### {number + 7}"}) + "\n"
            )
    with (place / "dialogues.jsonl").open("w") as file:
        for number in range(16):
            asked = f"\n\nHuman: How do I pick lock {number}?\n\nAssistant:"
            pair = {"chosen": f"{asked} Ask a locksmith, please.", "rejected": f"{asked} With a bent pin."}
            file.write(json.dumps(pair) + "\n")
    run(EXAMPLES["prepare_gsm8k.py"], cwd=place)
    return place


def check_fit(root: Path, *, steps: int = 2) -> None:
    """Every metric of a fit is finite, and its end was saved."""
    logged = tensorboard(root)
    assert len(logged["reward/mean"]) == steps
    assert [name for name, values in logged.items() if not all(map(math.isfinite, values))] == []
    state = json.loads((root / "checkpoints" / "last.ckpt" / "trainer.json").read_text())["state"]
    assert state["global_step"] == steps


@pytest.fixture(scope="module")
def trained(project: Path) -> Path:
    """The root directory of the README's first command, with a validation after each iteration."""
    run(
        f"{FIRST} {SHORT} --trainer.val_check_interval 1 --trainer.limit_val_batches 1".format(root="first"),
        cwd=project,
    )
    return project / "first"


def test_the_first_command_of_the_readme(trained: Path) -> None:
    assert FIRST in IN_README
    check_fit(trained)
    assert len(tensorboard(trained)["val/reward"]) == 2


@pytest.mark.timeout(600)
def test_the_other_commands_of_the_readme(project: Path) -> None:
    for line in IN_README:
        program, command, *words = shlex.split(line)
        if program == "python":
            assert EXAMPLES[Path(command).name].startswith(line)
        elif command == "fit" and "--help" not in words and line != FIRST:
            shutil.rmtree(project / "runs", ignore_errors=True)
            run(f"{line} {FEW}", cwd=project)
            check_fit(project / "runs")
        elif line != FIRST:
            run(line, cwd=project)
        if command == "export":
            assert AutoModelForCausalLM.from_pretrained(project / words[-1]).num_parameters() > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_the_command_of_a_config(name: str, project: Path, tmp_path: Path) -> None:
    line = re.match(rf"# (rlhf \w+ -c configs/{re.escape(name)})(?=\s|$)", CONFIGS[name])
    assert line
    if line[1] not in IN_README:
        run(f"{line[1]} {SHORT} --trainer.fast_dev_run true".format(root=tmp_path), cwd=project)
        assert not list(tmp_path.rglob("*.ckpt"))
        assert not tensorboard(tmp_path)


def test_every_example_is_run() -> None:
    assert {path.name for path in ROOT.glob("examples/*.py")} - {"__init__.py"} == set(EXAMPLES)
    for name, line in EXAMPLES.items():
        docstring = str(ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text())))
        assert re.split(r" --(?!algo)", line)[0] in docstring


@pytest.mark.timeout(600)
def test_the_whole_path_of_alignment(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(EXAMPLES["safe_alignment.py"].format(root=tmp_path), cwd=project)
    said = capsys.readouterr().out
    for role in ("reward", "cost"):
        assert re.search(rf"{role} model: accuracy [01]\.\d+ \[.*\] on 4 held-out pairs", said)
    table = (tmp_path / "answers.md").read_text().splitlines()
    assert table[0] == "| prompt | before | after |"
    assert len(table) == 2 + 4
    for role in ("actor", "critic", "cost_critic"):
        assert (tmp_path / "safe" / "checkpoints" / "last.ckpt" / role).is_dir()


def test_a_base_model_without_a_chat_template_is_refused(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "stand-in", tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    line = f"python examples/safe_alignment.py --dialogues dialogues.jsonl --model {tmp_path}/base"
    said = str(exit_code(line, cwd=project))
    assert said.startswith(f"--model {tmp_path}/base: has no chat template. ")
    assert not (project / "runs" / "safe_alignment").exists()


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - {"prepare_gsm8k.py", "safe_alignment.py"}))
def test_an_example(name: str, project: Path, tmp_path: Path) -> None:
    run(EXAMPLES[name].format(root=tmp_path), cwd=project)
    if EXAMPLES[name].startswith("rlhf"):
        check_fit(tmp_path)
    if name == "written_verdict.py":
        assert max(tensorboard(tmp_path)["judge/lr"]) >= max(tensorboard(tmp_path)["actor/lr"]), "both learn"
    elif name == "ppo.py":
        assert len(tensorboard(project / "runs" / "ppo")["reward/mean"]) == 20
    elif name == "length_budget.py":
        assert all(map(math.isfinite, tensorboard(tmp_path)["length/price"]))
    elif name == "distillation.py":
        first, _ = tensorboard(tmp_path)["distillation/reverse_kl"]
        assert first > 0, "the teacher is another model"
    elif name == "second_try.py":
        assert max(tensorboard(tmp_path)["response/length_mean"]) > 8, "more than one try"
    elif name == "embedded_sft.py":
        written, shipped = project / "runs" / "embedded", EMBEDDED_DIRECTORY
        sizes = [(place / "model.safetensors").stat().st_size for place in (written, shipped)]
        assert sizes[0] == sizes[1]


def test_what_the_preparation_leaves_is_what_the_config_names(project: Path) -> None:
    assert AutoTokenizer.from_pretrained(project / "models/smollm2-135m-instruct").chat_template
    assert len((project / "data/gsm8k_train.jsonl").read_text().splitlines()) == 64


def test_validate_and_predict_and_export_answer_alike(trained: Path, project: Path, tmp_path: Path) -> None:
    """The exported model says in plain transformers what `predict` says with the run's own engine."""
    checkpoint = trained / "checkpoints" / "last.ckpt"
    options = (
        f"--algo ppo --ckpt_path {checkpoint} --data.num_val_rows 24 --trainer.default_root_dir {tmp_path}"
    )
    run(f"rlhf validate {options} --trainer.limit_val_batches 1.0", cwd=project)
    validated = tensorboard(tmp_path)["val/reward"]
    run(f"rlhf predict {options}", cwd=project)
    run(f"rlhf export {checkpoint} {tmp_path / 'exported'}", cwd=project)

    predictions = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert len(predictions) == 24
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    right = 0
    for row in predictions:
        prompt = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        ids = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8
        )
        assert tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True) == row["response"]
        assert row["truncated"] == (int(ids[0, -1]) != tokenizer.eos_token_id)
        digits = re.findall(r"\d", row["prompt"])
        right += row["response"] == "".join(sorted(digits))
    assert validated == [pytest.approx(right / 24)]


def test_the_demo_in_a_process_of_its_own_on_a_running_cluster(cluster: str, tmp_path: Path) -> None:
    line = re.search(r"\$\(BIN\)/(rlhf fit .*)", (ROOT / "Makefile").read_text())
    assert line
    words = [str(Path(sys.executable).with_name("rlhf")), *shlex.split(line[1])[1:]]
    done = subprocess.run(
        [*words, *SHORT.format(root=tmp_path).split()],
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": cluster},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Apex" not in done.stdout, "extensions for GPUs, and these are CPUs"
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"demo: reward_first5=0\.\d+ reward_last5=0\.\d+ seconds=[\d.]+", last)
    assert (tmp_path / "reward.png").stat().st_size > 1000
    check_fit(tmp_path)
