"""One GPU in under eight minutes: training, generation, the turn between them, memory over ten iterations.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --model tiny --rounds 1 --device cpu      whether it runs, where there is no GPU

What `engines.py` measures, with a Llama of 1.1 B parameters in bfloat16, and the seconds from training to
generation and back, and of parameters, gradients and moments to the host and back. Needs what the engines
import: torch, transformers, tensordict. Writes results/gpu.json.
"""

import argparse
from dataclasses import asdict

import torch

from benchmarks.engines import SIZES, measure, opened, record, show
from benchmarks.spread import spread
from rlhf_lightning.engines.engine import PARTS


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(SIZES), default="1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU that PyTorch can use. Try --device cpu.")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, {args.model}: ", end="", flush=True)
    bench = opened(args.model, device, args.rounds)
    found = measure(bench)
    show(found)
    bench.train()  # so that there are moments
    size_bytes = sum(bench.engine.memory()[part] for part in PARTS)
    turn, away = spread(bench.seconds(bench.turn)), spread(bench.seconds(bench.send_away))
    print(f"turn        {turn} s from training to generation and back")
    print(f"host        {away} s there and back with {size_bytes / 2**30:.2f} GiB")
    moved = {"turn_s": turn.as_dict(), "host_s": away.as_dict(), "host_bytes": size_bytes}
    record("gpu", name, args.model, asdict(found) | moved)


if __name__ == "__main__":
    main()
