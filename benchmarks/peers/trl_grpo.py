"""TRL's GRPOTrainer at its best on a CPU: its default loss, one update an iteration, no second forward.

Started plainly it is one process; under torchrun the 64 sequences are shared (DDP over gloo).
"""

from datasets import Dataset
from iterations import Run, Stopwatch, from_command_line
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer
from trl_setup import Laps, bare_arguments, policy, report, tokenizer
from workload import PROMPT_TOKENS, RESPONSE_TOKENS, SAMPLES_PER_PROMPT, read_prompts, reward


class Rule:
    """The workload's reward in TRL's form, which notes the tokens of what it scores."""

    __name__ = "rule"

    def __init__(self, watch: Stopwatch, words: PreTrainedTokenizerBase) -> None:
        """Note on `watch`; `words` counts prompts."""
        self.watch, self.words = watch, words

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: object
    ) -> list[float]:
        """Reward of each row."""
        ids = self.words(prompts, add_special_tokens=False)["input_ids"]
        self.watch.note(sum(map(len, ids)), map(len, completion_ids))
        return reward(completions)


def configuration(run: Run) -> GRPOConfig:
    """8 prompts x 8 samples, one update an iteration, without a reference.

    What vLLM generates is trained on as it is, as one update needs no more.
    """
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": PROMPT_TOKENS + RESPONSE_TOKENS,
        "vllm_importance_sampling_correction": False,
    }
    return GRPOConfig(
        **bare_arguments(run),
        max_steps=run.warmup + run.iterations,
        num_generations=SAMPLES_PER_PROMPT,
        steps_per_generation=run.micro_batches,
        num_iterations=1,
        max_completion_length=RESPONSE_TOKENS,
        beta=0.0,
        logging_strategy="no",
        **(vllm if run.generator == "vllm" else {}),
    )


def main() -> None:
    """Train, time and print."""
    run, watch = from_command_line(), Stopwatch()
    words = tokenizer(run)
    trainer = GRPOTrainer(
        model=policy(run),
        reward_funcs=Rule(watch, words),
        args=configuration(run),
        train_dataset=Dataset.from_dict({"prompt": read_prompts(run.workload.prompts)}),
        processing_class=words,
        callbacks=[Laps(watch)],
    )
    trainer.train()
    report(watch, run)


if __name__ == "__main__":
    main()
