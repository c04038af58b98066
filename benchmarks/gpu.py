"""One GPU in under eight minutes: training, generation, the turn between them, memory over ten iterations.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --model tiny --rounds 1 --device cpu      whether it runs, where there is no GPU

What `engines.py` measures, with a Llama of 1.1 B parameters in bfloat16 whose layers are compiled for
training, an update without that, generation of answers that end early, and the seconds from training to
generation and back, and of parameters, gradients and moments to the host and back. Needs what the engines
import: torch, transformers, tensordict.
Writes results/gpu.json.
"""

from dataclasses import asdict, dataclass

import torch
from tensordict import TensorDict

from benchmarks import environments
from benchmarks.engines import SIZES, Bench, measure, opened, record, show
from benchmarks.spread import Spread, spread
from rlhf_lightning.engines.offload import PARTS


def eager_s(model: str, device: torch.device, rounds: int) -> Spread:
    """Seconds of an update with layers as they are, of an engine that goes away again."""
    bench = opened(model, device, rounds)
    return spread(bench.seconds(bench.train))


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Answers that end at stop tokens: one in 160 of the vocabulary, which a new model draws alike."""

    seconds: Spread
    tokens: int
    longest: int

    @classmethod
    def of(cls, bench: Bench) -> "Ragged":
        """Generate with a bench."""
        answers: list[TensorDict] = []
        stops = range(1, 1 + bench.size.vocabulary // 160)
        seconds = spread(bench.seconds(lambda: answers.append(bench.generate(stops=stops))))
        lengths = answers[-1]["response_mask"].sum(1)
        return cls(seconds=seconds, tokens=int(lengths.sum()), longest=int(lengths.max()))


def main() -> None:
    """Measure, print, and write the result."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--model", choices=tuple(SIZES), default="1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU that PyTorch can use. Try --device cpu.")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, {args.model}: ", end="", flush=True)
    bench = opened(args.model, device, args.rounds, compiled=True)
    found = measure(bench)
    show(found)
    ragged = Ragged.of(bench)
    print(f"ragged      {ragged.seconds} s for {ragged.tokens} tokens, at most {ragged.longest} a row")
    plain = eager_s(args.model, device, args.rounds)
    share = bench.size.training_flop / found.rates.flops / plain.median
    print(f"training    {plain} s, {share:.0%} of the matrix rate, layers as they are")
    bench.train()  # so that there are moments
    size_bytes = sum(bench.engine.memory()[part] for part in PARTS)
    turn, away = spread(bench.seconds(bench.turn)), spread(bench.seconds(bench.send_away))
    print(f"turn        {turn.median * 1e3:.2f} ms from training to generation and back")
    print(f"host        {away} s there and back with {size_bytes / 2**30:.2f} GiB")
    moved = {"turn_s": turn.as_dict(), "host_s": away.as_dict(), "host_bytes": size_bytes}
    seconds = {"eager_s": plain.as_dict(), "ragged": asdict(ragged)}
    record("gpu", name, args.model, {**asdict(found), **seconds, **moved})


if __name__ == "__main__":
    main()
