"""TRL's PPOTrainer (last in 1.12) at its best on a CPU: one epoch, one update an iteration.

Started plainly it is one process; under torchrun the 64 sequences are shared (DDP over gloo). PPOTrainer asks
for a reward model; `Rule` gives it the workload's reward for the price of a rule.
"""

from types import SimpleNamespace

import torch
from datasets import Dataset
from iterations import Run, Stopwatch, from_command_line
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerBase
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl_setup import Laps, bare_arguments, policy, report, tokenizer
from workload import KL, RESPONSE_TOKENS, SEQUENCES, read_prompts, reward


class Rule(nn.Module):
    """A rule in the form of a reward model: a backbone that passes ids on, and a head that scores them."""

    base_model_prefix = "backbone"

    def __init__(self, watch: Stopwatch, words: PreTrainedTokenizerBase) -> None:
        """Score the text that `words` decodes; note on `watch` the tokens of what it scores."""
        super().__init__()
        self.watch, self.words = watch, words
        self.backbone = self.passed_on

    def passed_on(self, input_ids: Tensor, attention_mask: Tensor, **_: object) -> SimpleNamespace:
        """input_ids and attention_mask: [B, P + R], as the last hidden state [B, P + R, 2] int64."""
        return SimpleNamespace(hidden_states=[torch.stack((input_ids, attention_mask.long()), dim=-1)])

    def score(self, hidden: Tensor) -> Tensor:
        """hidden: [B, P + R, 2] int64; the reward of each row at every position, [B, P + R, 1] float32.

        PPOTrainer draws RESPONSE_TOKENS tokens for every row, and has masked what comes after an end.
        """
        ids, mask = hidden.unbind(-1)
        prompts, lengths = mask[:, :-RESPONSE_TOKENS].sum(), mask[:, -RESPONSE_TOKENS:].sum(dim=1)
        self.watch.note(int(prompts), lengths.tolist())
        rows = zip(ids[:, -RESPONSE_TOKENS:].tolist(), lengths.tolist(), strict=True)
        texts = self.words.batch_decode([row[:length] for row, length in rows], skip_special_tokens=True)
        return torch.tensor(reward(texts)).view(-1, 1, 1).expand(*ids.shape, 1)


def configuration(run: Run) -> PPOConfig:
    """64 prompts x 1 sample, one update an iteration."""
    return PPOConfig(
        **bare_arguments(run),
        total_episodes=SEQUENCES * (run.warmup + run.iterations),
        num_ppo_epochs=1,
        num_mini_batches=1,
        local_rollout_forward_batch_size=SEQUENCES // run.processes,
        response_length=RESPONSE_TOKENS,
        stop_token="eos" if run.lengths == "ragged" else None,
        num_sample_generations=0,
        kl_coef=KL,
    )


def main() -> None:
    """Train, time and print."""
    run, watch = from_command_line(), Stopwatch()
    words = tokenizer(run)
    trainer = PPOTrainer(
        args=configuration(run),
        processing_class=words,
        model=policy(run),
        ref_model=policy(run),
        reward_model=Rule(watch, words),
        value_model=LlamaForSequenceClassification.from_pretrained(
            run.workload.model, num_labels=1, dtype=run.dtype
        ),
        train_dataset=Dataset.from_dict(
            {"input_ids": words(read_prompts(run.workload.prompts))["input_ids"]}
        ),
        callbacks=[Laps(watch)],
    )
    trainer.train()
    report(watch, run)


if __name__ == "__main__":
    main()
