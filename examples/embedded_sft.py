"""Train the weights of the embedded model: SFT on sorting digits, stopped while PPO still has much to gain.

    python examples/embedded_sft.py --steps 64
    python examples/embedded_sft.py --steps 64 --out rlhf_lightning/embedded

The first writes into runs/embedded, the second over the weights that the package ships. Prints the share of
held-out rows that the model answers exactly when sampled at temperature 1.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import lightning.pytorch as pl

from rlhf_lightning.algos import SFT
from rlhf_lightning.controller import Batch
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Colocated
from rlhf_lightning.workers import Actor

_EMBEDDED = Path(__file__).parent.parent / "rlhf_lightning" / "embedded"


class Export(pl.Callback):
    """Measure and write the weights while the workers still hold them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sample answers to the held-out prompts, then export."""
        assert isinstance(pl_module, SFT)
        right: list[bool] = []
        for columns in data.val_dataloader()[0]:
            rows = Batch.of({name: columns[name] for name in ("prompt_ids", "prompt_mask", "row_ids")})
            wanted, mask = columns["response_ids"], columns["response_mask"]
            ids = pl_module.actor.generate_sequences(rows)["response_ids"][:, : wanted.shape[1]]
            right += ((ids == wanted) | ~mask).all(dim=1).tolist()
        print(f"exact answers: {sum(right) / len(right):.3f} of {len(right)}")
        pl_module.actor.export(directory=self.directory).fetch()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=64)
parser.add_argument("--out", type=Path, default=Path("runs/embedded"))
args = parser.parse_args()
with tempfile.TemporaryDirectory() as scratch:
    start, end = Path(scratch, "start"), Path(scratch, "end")
    shutil.copytree(
        _EMBEDDED, start, ignore=shutil.ignore_patterns("*.safetensors")
    )  # config alone: fresh weights
    optimizer = OptimizerSpec(
        lr=2e-3, warmup_steps=min(20, args.steps // 3), schedule="linear", total_steps=args.steps + 1
    )
    sft = SFT(actor=Actor(path=str(start), optimizer=optimizer, sampling=Sampling(max_new_tokens=8)))
    data = TaskData(batch_size=128, num_rows=16384, num_val_rows=1024, completions=True)
    trainer = pl.Trainer(
        strategy=Colocated(),
        accelerator="cpu",
        max_steps=args.steps,
        callbacks=[Export(end)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(sft, datamodule=data)
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(end / "model.safetensors", args.out)
