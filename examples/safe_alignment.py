"""From a base model and preferences to an aligned model: SFT, reward model, cost model, then Safe-RLHF.

    python examples/safe_alignment.py --dialogues hh_harmless_base_test.jsonl.gz

takes the dialogues of Anthropic's hh-rlhf (`chosen` and `rejected`) and the embedded model, or that of
`--model`, which needs a chat template (for a base model put one beside it). Every stage is a
command, which is printed before it runs. `--out` gets data, models, checkpoints and answers.md: answers to
held-out prompts before and after the last stage.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
from pathlib import Path

from rlhf_lightning.data.dialogue import as_messages, split_dialogues
from rlhf_lightning.data.rows import read_rows
from rlhf_lightning.data.tokenizer import load_tokenizer

Pair = dict[str, object]
LOSSES = {"reward": "rewardmodel", "cost": "costmodel"}


def read_pairs(args: argparse.Namespace) -> list[Pair]:
    """Pairs short enough; of a pair about harm, the rejected answer counts as harmful."""
    tokenizer, pairs = load_tokenizer(args.model), []
    if not tokenizer.chat_template:
        sys.exit(f"--model {args.model}: has no chat template. Put one there as chat_template.jinja.")
    for number, row in enumerate(read_rows(args.dialogues)):
        texts = [str(row["chosen"]), str(row["rejected"])]
        prompt, answers = split_dialogues(texts, where=f"row {number}")
        messages, (chosen, rejected) = as_messages(prompt, where=f"row {number}"), map(str.strip, answers)
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        lengths = [len(tokenizer(str(text))["input_ids"]) for text in (rendered, chosen, rejected)]
        fits = lengths[0] <= args.prompt_tokens and max(lengths[1:]) < args.response_tokens
        if fits and chosen != rejected and chosen and rejected:
            answers_of = {"chosen": chosen, "rejected": rejected}
            pairs.append({"prompt": messages, **answers_of, "chosen_safe": True, "rejected_safe": False})
    return pairs


def write(rows: list[Pair], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rlhf(command: str) -> None:
    print(f"\n$ rlhf {command}", flush=True)
    subprocess.run([sys.executable, "-m", "rlhf_lightning", *shlex.split(command)], check=True)  # noqa: S603


def an_epoch(root: Path, more: str) -> str:
    """Options of a `fit` over all rows, which logs below `root`."""
    logs = f"--trainer.logger CSVLogger --trainer.logger.save_dir {root}"
    return f"--trainer.max_epochs 1 {logs} --trainer.default_root_dir {root} {more}"


def accuracy(root: Path, pairs: int) -> str:
    """Held-out accuracy at the end, with the 95 % interval of that many pairs."""
    newest = max(root.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
    with newest.open() as file:
        found = [float(row["val/accuracy"]) for row in csv.DictReader(file) if row.get("val/accuracy")][-1]
    margin = 1.96 * (found * (1 - found) / pairs) ** 0.5
    return (
        f"{found:.3f} [{found - margin:.3f}, {found + margin:.3f}] on {pairs} held-out pairs; a coin: 0.500"
    )


def answers(root: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (root / "predictions.jsonl").read_text().splitlines()]


def main(args: argparse.Namespace) -> None:
    out: Path = args.out
    pairs = read_pairs(args)[: args.pairs + args.held_out]
    held_out = pairs[: args.held_out]
    write(held_out, out / "data" / "val.jsonl")
    write(pairs[args.held_out :], out / "data" / "train.jsonl")
    limits = f"--data.max_prompt_tokens {args.prompt_tokens} --data.chat_template true"
    limits += f" --data.path {out}/data/train.jsonl --data.val_path {out}/data/val.jsonl"
    both = f"{limits} --data.max_response_tokens {args.response_tokens} --data.batch_size {args.step}"

    sft = f"--algo sft --algo.actor.path {args.model} --algo.actor.optimizer.lr {args.lr}"
    chosen = f"--data completiondata {both} --data.response_field chosen"
    rlhf(f"fit {sft} {chosen} {an_epoch(out / 'sft', args.more)}")
    rlhf(f"export {out}/sft/checkpoints/last.ckpt {out}/models/sft")
    for role, algo in LOSSES.items():
        options = f"--algo {algo} --algo.{role}.path {out}/models/sft --algo.{role}.optimizer.lr {args.lr}"
        safe = "--data.safe_fields [chosen_safe,rejected_safe]"
        rlhf(f"fit {options} --data preferencedata {both} {safe} {an_epoch(out / role, args.more)}")
        rlhf(f"export {out}/{role}/checkpoints/last.ckpt {out}/models/{role} {role}")
    sampling = f"--algo.actor.sampling.max_new_tokens {args.response_tokens}"
    num_prompts = args.step * args.iterations
    prompts = f"--data promptdata {limits} --data.batch_size {args.step} --data.limit {num_prompts}"
    before = f"--algo sft --algo.actor.path {out}/models/sft {sampling}"
    rlhf(f"predict {before} {prompts} --trainer.default_root_dir {out}/before {args.place}")
    safe_rlhf = (
        f"--algo saferlhf --algo.actor.path {out}/models/sft {sampling}"
        f" --algo.actor.optimizer.lr {args.lr / 10}"
        f" --algo.reward.path {out}/models/reward --algo.cost.path {out}/models/cost"
        f" --algo.critic.path {out}/models/reward --algo.critic.optimizer.lr {args.lr / 2}"
        f" --algo.cost_critic.path {out}/models/cost --algo.cost_critic.optimizer.lr {args.lr / 2}"
    )
    rlhf(f"fit {safe_rlhf} {prompts} --trainer.limit_val_batches 0 {an_epoch(out / 'safe', args.more)}")
    last = f"--ckpt_path {out}/safe/checkpoints/last.ckpt"
    rlhf(f"predict {safe_rlhf} {prompts} {last} --trainer.default_root_dir {out}/after {args.place}")
    lines = ["| prompt | before | after |", "|---|---|---|"]
    for old, new in zip(answers(out / "before"), answers(out / "after"), strict=True):
        cells = (old["prompt"][-200:], old["response"], new["response"])
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |")
    (out / "answers.md").write_text("\n".join(lines) + "\n")
    for role in LOSSES:
        print(f"{role} model: accuracy {accuracy(out / role, len(held_out))}")
    print(f"answers before and after: {out}/answers.md")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--dialogues", required=True)
parser.add_argument("--model", default="embedded")
parser.add_argument("--out", type=Path, default=Path("runs/safe_alignment"))
parser.add_argument("--pairs", type=int, default=800)
parser.add_argument("--held-out", type=int, default=200)
parser.add_argument("--prompt-tokens", type=int, default=320)
parser.add_argument("--response-tokens", type=int, default=160)
parser.add_argument("--step", type=int, default=16)
parser.add_argument("--iterations", type=int, default=8)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument(
    "--place", default="", help="options of `rlhf` that say where, such as '--strategy local'"
)
parser.add_argument("--more", default="", help="more options of every `fit`")
arguments = parser.parse_args()
arguments.more = f"{arguments.more} {arguments.place}"
main(arguments)
