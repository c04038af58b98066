"""How long new weights take to get into vLLM: lent where they lie, and copied name by name.

    python benchmarks/vllm_update.py

Megatron trains a Llama of 110 M parameters in float32, and vLLM generates with it in the same processes, on
gloo. A round is one update, the slowest rank's, there and not back. Prints the median, and what the rank with
the most receives where weights are lent; a copying one is given every parameter whole, one after the other.
Writes results/vllm_update.json.
"""

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import environments
import torch
import torch.distributed as dist
from spread import machine
from tensordict import TensorDict
from transformers import LlamaConfig

from rlhf_lightning.engines import VLLM, Ends
from rlhf_lightning.engines.megatron.engine import MegatronEngine
from rlhf_lightning.engines.vllm.engine import VLLMEngine
from rlhf_lightning.parallel import Generation, ModelGroups, ParallelLayout, Seat
from rlhf_lightning.spec import ModelSpec, Sampling

LAYOUTS = ("1,1", "2,2", "2,1", "4,4", "4,2")
"""t and generate.t."""
WAYS = {"lent": True, "copied": False}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one set of processes measures."""

    model: str
    t: int
    generate: int
    zero_copy: bool
    rounds: int


def update(engine: VLLMEngine) -> float:
    """Seconds of one update, from when all ranks are ready; a single token is said."""
    rows = TensorDict(
        {
            "prompt_ids": torch.ones(1, 1, dtype=torch.int64),
            "prompt_mask": torch.ones(1, 1, dtype=torch.bool),
            "row_ids": torch.zeros(1, dtype=torch.int64),
        },
        batch_size=1,
    )
    engine.source.version += 1
    dist.barrier()
    engine.generate(rows, sampling=Sampling(max_new_tokens=1), seed=0)
    return engine.update_s


def run_rank(rank: int, job: Job, directory: str) -> None:
    """One rank; rank 0 writes the most of all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=job.t)
    layout = ParallelLayout(t=job.t, generation=Generation(t=job.generate))
    seat = Seat(rank, layout, torch.device("cpu"), None, ModelGroups.create_all(layout))
    spec = ModelSpec(path=job.model)
    source = MegatronEngine(spec, seat=seat)
    config = VLLM(kv_cache_gib=0.1, max_num_seqs=1, max_model_len=64, zero_copy=job.zero_copy)
    ends = Ends(pad_token_id=0, eos_token_ids=(2,))
    engine = VLLMEngine(spec, source, seat=seat, ends=ends, config=config)
    update(engine)
    seconds = [update(engine) for _ in range(job.rounds)]
    received = source.transition().received_bytes if job.zero_copy else 0
    everyone: list[tuple[list[float], int]] = [(seconds, received)] * job.t
    dist.all_gather_object(everyone, (seconds, received))
    slowest = [max(each) for each in zip(*(one for one, _ in everyone), strict=True)]
    if rank == 0:
        found = {"seconds": slowest, "received_bytes": max(bytes_ for _, bytes_ in everyone)}
        Path(directory, "result.json").write_text(json.dumps(found))
    dist.barrier()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One way."""

    seconds: list[float]
    """Of each round."""
    received_bytes: int
    """Of one transition, where weights are lent."""


def started(job: Job) -> Measured:
    """Run the ranks of a job, forks of this process, to their end."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.start_processes(
            run_rank, args=(job, directory), nprocs=job.t, start_method="fork"
        )
        return Measured(**json.loads(Path(directory, "result.json").read_text()))


def measure(model: str, layout: str, rounds: int) -> dict[str, Measured]:
    """Both ways in one layout; print them."""
    t, generate = (int(size) for size in layout.split(","))
    found = {}
    for name, zero_copy in WAYS.items():
        job = Job(model=model, t=t, generate=generate, zero_copy=zero_copy, rounds=rounds)
        found[name] = one = started(job)
        received = f"{one.received_bytes / 1e6:>9.1f} MB" if zero_copy else ""
        middle = statistics.median(one.seconds) * 1e3
        print(f"t={t} generate.t={generate} {name:<7}{middle:>9.1f} ms{received}", flush=True)
    return found


def main() -> None:
    """Measure layout by layout, print, and write the result."""
    parser = environments.parser_of(__doc__)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="t,generate.t of each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=16384)
    args = parser.parse_args()
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as model:
        LlamaConfig(
            hidden_size=args.hidden,
            intermediate_size=round(args.hidden * 8 / 3 / 64) * 64,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            vocab_size=args.vocabulary,
            tie_word_embeddings=False,
        ).save_pretrained(model)
        for layout in args.layouts:
            found = measure(model, layout, args.rounds)
            results[layout] = {name: asdict(one) for name, one in found.items()}
    sizes = {"hidden": args.hidden, "layers": args.layers, "vocabulary": args.vocabulary}
    result = {"machine": machine(), "model": sizes, "layouts": results}
    print(f"written: {environments.write_result('vllm_update', result)}")


if __name__ == "__main__":
    main()
