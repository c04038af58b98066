"""Training alone and generation alone on one device, beside the bounds that the device's own rates give.

    python -m benchmarks.engines                    a Llama of 100 M; a CPU's float32, a GPU's bfloat16
    python -m benchmarks.engines --model 1b         one of 1.1 B
    python -m benchmarks.engines --compile          training with compiled layers
    python -m benchmarks.engines --model tiny --rounds 1

Matrix products and copies of large tensors are timed before, between and after; the best counts. The bound
of training is its floating-point operations at that rate; that of a decoding step is the longer of its
operations and of its bytes (weights, keys and values, each read once). Writes results/engines-<device>.json.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tensordict import TensorDict
from transformers import LlamaConfig

from benchmarks import environments
from benchmarks.spread import Spread, machine, spread
from rlhf_lightning.engines import FSDP, FSDPEngine, Native, NativeGenerator
from rlhf_lightning.engines.ends import Ends
from rlhf_lightning.engines.offload import PARTS
from rlhf_lightning.functional import Counts, PolicyLoss
from rlhf_lightning.mapping.probe import made_rows
from rlhf_lightning.spec import ModelSpec, Sampling


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama and how much it is given to do."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    rows: int
    prompt: int
    response: int

    @property
    def products(self) -> int:
        """Weights that a token is multiplied with, the output layer's aside."""
        narrow = self.hidden * self.kv_heads // self.heads
        return self.layers * (2 * self.hidden * (self.hidden + narrow) + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Weights of the output layer."""
        return self.hidden * self.vocabulary

    def attention(self, context: int) -> int:
        """Operations of one token that sees `context` others, itself among them."""
        return 4 * self.layers * self.hidden * context

    @property
    def training_flop(self) -> float:
        """Of an update: forward and twice as much backward; logits of responses only."""
        length = self.prompt + self.response
        tokens = length * 2 * self.products + length * self.attention(length) / 2
        return 3 * self.rows * (tokens + self.response * 2 * self.head)

    def decoding_s(self, element: int, rates: "Rates") -> float:
        """Seconds of all steps at the device's rates."""
        seconds = (
            self.rows * self.prompt * (2 * self.products + self.attention(self.prompt) / 2) / rates.flops
        )
        for step in range(1, self.response):
            context = self.prompt + step
            flop = self.rows * (2 * (self.products + self.head) + self.attention(context))
            kept = 2 * self.layers * self.hidden * self.kv_heads // self.heads * self.rows * context
            bytes_ = element * (self.products + self.head + kept)
            seconds += max(flop / rates.flops, bytes_ / rates.bandwidth)
        return seconds


SIZES = {
    "tiny": Size(
        hidden=64, layers=2, intermediate=128, heads=2, kv_heads=2, vocabulary=512, rows=4, prompt=8,
        response=8,
    ),
    "100m": Size(
        hidden=768, layers=12, intermediate=2048, heads=12, kv_heads=12, vocabulary=16384, rows=32,
        prompt=64, response=64,
    ),
    "1b": Size(
        hidden=2048, layers=22, intermediate=5632, heads=32, kv_heads=4, vocabulary=32000, rows=128,
        prompt=256, response=256,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """What the device does at most."""

    flops: float
    """Floating-point operations a second, in matrix products of large squares."""
    bandwidth: float
    """Bytes a second, read and written."""

    def best(self, other: "Rates") -> "Rates":
        """Of two times at which they were measured: a shared machine's speed changes."""
        return Rates(max(self.flops, other.flops), max(self.bandwidth, other.bandwidth))


class Bench:
    """One device, one model."""

    def __init__(
        self, size: Size, device: torch.device, directory: Path, *, rounds: int, config: FSDP
    ) -> None:
        self.size, self.device, self.rounds = size, device, rounds
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        llama = LlamaConfig(
            architectures=["LlamaForCausalLM"],
            hidden_size=size.hidden,
            num_hidden_layers=size.layers,
            intermediate_size=size.intermediate,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            vocab_size=size.vocabulary,
            max_position_embeddings=size.prompt + size.response,
        )
        llama.save_pretrained(directory)
        name = str(self.dtype).removeprefix("torch.")
        spec = ModelSpec(path=str(directory), dtype=name)  # type: ignore[arg-type]
        self.engine = FSDPEngine(spec, device=device, config=config)
        rows = made_rows(size.rows, prompt=size.prompt, response=size.response, vocabulary=size.vocabulary)
        self.rows = rows.to(device)

    def seconds(self, run: Callable[[], object]) -> list[float]:
        """Of every round after the first."""
        found = []
        for _ in range(self.rounds + 1):
            self._meet()
            started = time.perf_counter()
            run()
            self._meet()
            found.append(time.perf_counter() - started)
        return found[1:]

    def _meet(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def rates(self) -> Rates:
        """The best of all rounds."""
        side = 8192 if self.device.type == "cuda" else 2048
        a, b = (torch.randn(side, side, device=self.device, dtype=self.dtype) for _ in range(2))
        product = min(self.seconds(lambda: a @ b))
        large = torch.zeros((1 << 31 if self.device.type == "cuda" else 1 << 28) // 4, device=self.device)
        other = torch.empty_like(large)
        copy = min(self.seconds(lambda: other.copy_(large)))
        return Rates(2 * side**3 / product, 2 * large.nbytes / copy)

    def train(self) -> None:
        """One update."""
        counts = Counts.of(self.rows["response_mask"])
        self.engine.accumulate(self.rows, PolicyLoss(), counts, temperature=1.0)
        self.engine.optimizer_step()

    def generate(self, *, stops: Sequence[int] = ()) -> TensorDict:
        """Answer all rows, to the full length or to the first of these tokens."""
        with self.engine.generating() as decoder:
            generator = NativeGenerator(
                decoder, device=self.device, ends=Ends(pad_token_id=0), config=Native()
            )
            sampling = Sampling(max_new_tokens=self.size.response, stop_token_ids=tuple(stops))
            return generator.generate(self.rows, sampling=sampling, seed=0)

    def turn(self) -> None:
        """From training to generation and back, without a token."""
        with self.engine.generating():
            pass

    def send_away(self) -> None:
        """Parameters, gradients and moments to the host and back."""
        self.engine.offload(PARTS)
        self.engine.reload(PARTS)

    def peaks(self, iterations: int) -> list[int]:
        """Bytes allocated at most after each of some iterations; nothing on a CPU."""
        if self.device.type != "cuda":
            return []
        found = []
        for _ in range(iterations):
            self.generate()
            self.train()
            found.append(torch.cuda.max_memory_allocated())
        return found


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was found."""

    rates: Rates
    train_s: Spread
    train_share: float
    """Of the matrix rate: model FLOP utilisation."""
    generate_s: Spread
    generate_share: float
    """The bound over what was measured."""
    peak_bytes: list[int]
    """After each of ten iterations."""


def measure(bench: Bench) -> Result:
    """Everything on one device."""
    size, rates = bench.size, bench.rates()
    gc.collect()
    train = bench.seconds(bench.train)
    rates = rates.best(bench.rates())
    generate = bench.seconds(bench.generate)
    rates = rates.best(bench.rates())
    return Result(
        rates=rates,
        train_s=spread(train),
        train_share=size.training_flop / rates.flops / statistics.median(train),
        generate_s=spread(generate),
        generate_share=size.decoding_s(bench.dtype.itemsize, rates) / statistics.median(generate),
        peak_bytes=bench.peaks(10),
    )


def show(found: Result) -> None:
    """Print what was found."""
    print(f"products {found.rates.flops / 1e12:.3f} TFLOP/s, copies {found.rates.bandwidth / 1e9:.1f} GB/s")
    print(f"training    {found.train_s} s, {found.train_share:.0%} of the matrix rate")
    print(f"generation  {found.generate_s} s, {found.generate_share:.0%} of its bound")
    if found.peak_bytes:
        first, last = found.peak_bytes[0] / 2**30, found.peak_bytes[-1] / 2**30
        print(f"peak        {first:.2f} GiB, {last:.2f} after ten")


def record(file: str, device: str, model: str, found: Mapping[str, object]) -> None:
    """Write a result, and where and when it was found."""
    where = {"machine": machine(), "device": device, "model": model}
    print(f"written: {environments.write_result(file, {**where, **found})}")


def opened(model: str, device: torch.device, rounds: int, *, compiled: bool = False) -> Bench:
    """A model of SIZES on a device, which has read its files."""
    with tempfile.TemporaryDirectory() as directory:
        config = FSDP(compile_layers=compiled)
        return Bench(SIZES[model], device, Path(directory), rounds=rounds, config=config)


def main() -> None:
    """Measure, print, and write the result."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--model", choices=tuple(SIZES), default="100m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{args.threads} threads"
    print(f"{device} ({name}), {args.model}: ", end="")
    found = measure(opened(args.model, device, args.rounds, compiled=args.compile))
    show(found)
    record(f"engines-{device.type}", name, args.model, asdict(found))


if __name__ == "__main__":
    main()
