"""Seconds of experience: answers scored when all have ended, and part by part while the longer ones go on.

    python -m benchmarks.pipelined
    python -m benchmarks.pipelined --rounds 2 --rows 8 --layers 1 --scorer-layers 1 --stops 40

Actor, generator and reference have a device each; on a machine of two cores the generator computes on one
and the reference on the other. Answers end at random, so that most are short and a few are long. A round
takes the same prompts three ways, in turns: one after the other; in parts, side by side; and in parts, but
scored only after the last has ended. The third measures when each part is there and how long it takes to
score, with nothing beside it: the critical path through these is the prediction. Nothing is learned, and no
weights move.

Prints medians and ranges of the rounds, and writes results/pipelined.json.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import environments
from benchmarks.small_runs import quiet_trainer, write_llama
from benchmarks.spread import machine, spread
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.controller import Batch, CallReport, Metrics
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import Sampling
from rlhf_lightning.strategies import Pipelined
from rlhf_lightning.workers import Actor, Reference


@dataclass(frozen=True, kw_only=True)
class Round:
    """One batch, three ways."""

    sequential_s: float
    """From the call that generates until the controller has read the scores, one after the other."""
    pipelined_s: float
    """The same, in parts side by side."""
    generation_s: float
    """Of all rows, handed over at once."""
    scoring_s: float
    """Of all rows together."""
    ended_s: tuple[float, ...]
    """When each part is there, from the call that generates, with nothing beside."""
    parts_s: tuple[float, ...]
    """Scoring each part, with nothing beside."""
    lengths: tuple[int, ...]
    """Tokens of the answers."""

    @property
    def saved(self) -> float:
        """Share of the sequential experience that is saved."""
        return 1 - self.pipelined_s / self.sequential_s

    @property
    def predicted(self) -> float:
        """The same share of the critical path: scoring a part waits for the part and for the one before."""
        done = 0.0
        for ended, scoring in zip(self.ended_s, self.parts_s, strict=True):
            done = max(done, ended) + scoring
        return 1 - done / (self.generation_s + self.scoring_s)


class Experience(RLHFAlgorithm):
    """Answers and scores each batch three ways, and learns nothing."""

    actor: Actor = field(default_factory=Actor)
    """Answers."""
    reference: Reference = field(default_factory=Reference)
    """Scores."""

    def __post_init__(self) -> None:
        """No rounds yet."""
        self.rounds: list[Round] = []

    def step(self, batch: Batch) -> Metrics:
        """One round; which way comes first changes from round to round."""
        strategy = self.strategy
        assert isinstance(strategy, Pipelined)
        ways: list[tuple[str, Callable[[Batch], float]]] = [
            ("sequential", lambda rows: self.together(rows, parts=1)),
            ("pipelined", lambda rows: self.together(rows, parts=strategy.parts)),
            ("apart", self.apart),
        ]
        first = self.global_step % len(ways)
        found = {}
        for name, way in ways[first:] + ways[:first]:
            strategy.drain()
            found[name] = way(batch)
        self.rounds.append(
            Round(
                sequential_s=found["sequential"],
                pipelined_s=found["pipelined"],
                generation_s=self.generation_s,
                scoring_s=self.scoring_s,
                ended_s=self.ended_s,
                parts_s=self.parts_s,
                lengths=tuple(self.lengths),
            )
        )
        return Metrics.of({"reward/mean": 0.0})

    def together(self, batch: Batch, *, parts: int) -> float:
        """Seconds until all scores are read."""
        began = self._begin(parts)
        batch |= self.actor.generate_sequences(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        mask = (batch["ref_log_probs"] != 0) & batch["response_mask"]
        seconds = time.time() - began
        self.lengths = mask.sum(dim=1).tolist()
        reports = self.strategy.drain()
        if parts == 1:
            (self.generation_s,) = (r.seconds for r in _of(reports, "generate_sequences"))
            (self.scoring_s,) = (r.seconds for r in _of(reports, "compute_ref_log_prob"))
        return seconds

    def apart(self, batch: Batch) -> float:
        """Seconds of generating in parts and then scoring them."""
        strategy = self.strategy
        assert isinstance(strategy, Pipelined)
        began = self._begin(strategy.parts)
        batch |= self.actor.generate_sequences(batch)
        ended = _of(strategy.drain(), "next_sequences")
        self.ended_s = tuple(r.started_s + r.seconds - began for r in ended)
        batch |= self.reference.compute_ref_log_prob(batch)
        self.parts_s = tuple(r.seconds for r in _of(strategy.drain(), "compute_ref_log_prob"))
        return time.time() - began

    def _begin(self, parts: int) -> float:
        strategy = self.strategy
        assert isinstance(strategy, Pipelined)
        assert strategy.generation is not None
        strategy.generation.parts = parts
        return time.time()


def _of(reports: Sequence[CallReport], method: str) -> list[CallReport]:
    found = [report for report in reports if report.method == method]
    return sorted(found, key=lambda report: report.started_s)


def play(args: argparse.Namespace) -> list[Round]:
    """Run all rounds in this process; the first warms up and is left out."""
    with tempfile.TemporaryDirectory() as folder:
        actor, scorer = (
            write_llama(Path(folder, name), hidden=256, intermediate=688, layers=layers, heads=4)
            for name, layers in (("actor", args.layers), ("scorer", args.scorer_layers))
        )
        # A fresh model says all tokens equally often: an answer ends at each with probability stops / 264.
        sampling = Sampling(max_new_tokens=args.tokens, stop_token_ids=tuple(range(args.stops)))
        algorithm = Experience(actor=Actor(path=actor, sampling=sampling), reference=Reference(path=scorer))
        trainer = quiet_trainer(Pipelined(parts=args.parts), folder, steps=args.rounds + 1)
        rows = args.rows * (args.rounds + 1)
        trainer.fit(algorithm, datamodule=TaskData(num_rows=rows, num_val_rows=2, batch_size=args.rows))
    return algorithm.rounds[1:]


def shown(rounds: Sequence[Round]) -> str:
    """The table."""
    lengths = [length for one in rounds for length in one.lengths]
    lines = [
        f"answers: median {statistics.median(lengths):.0f} tokens, longest {max(lengths)}",
        f"generation alone, s          {spread([one.generation_s for one in rounds])}",
        f"  in parts                   {spread([one.ended_s[-1] for one in rounds])}",
        f"scoring alone, s             {spread([one.scoring_s for one in rounds])}",
        f"  in parts                   {spread([sum(one.parts_s) for one in rounds])}",
        f"one after the other, s       {spread([one.sequential_s for one in rounds])}",
        f"side by side, s              {spread([one.pipelined_s for one in rounds])}",
        f"share saved                  {spread([one.saved for one in rounds])}",
        f"the critical path predicts   {spread([one.predicted for one in rounds])}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the result."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="longest answer")
    parser.add_argument("--stops", type=int, default=6, help="of 264 tokens those that end an answer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--scorer-layers", type=int, default=12)
    args = parser.parse_args()
    rounds = play(args)
    print(shown(rounds))
    result = {
        "machine": machine(),
        "options": vars(args),
        "rounds": [asdict(one) | {"saved": one.saved, "predicted": one.predicted} for one in rounds],
        "saved": spread([one.saved for one in rounds]).as_dict(),
        "predicted": spread([one.predicted for one in rounds]).as_dict(),
    }
    print(f"\nwritten: {environments.write_result('pipelined', result)}")


if __name__ == "__main__":
    main()
