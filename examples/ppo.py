"""PPO from Python with a stock Lightning Trainer, on the embedded model: python examples/ppo.py."""

import lightning.pytorch as pl

from rlhf_lightning.algos import PPO
from rlhf_lightning.data import TaskData
from rlhf_lightning.spec import OptimizerSpec, Sampling
from rlhf_lightning.strategies import Colocated
from rlhf_lightning.workers import Actor, Critic

actor = Actor(optimizer=OptimizerSpec(lr=2e-4), sampling=Sampling(max_new_tokens=8))
critic = Critic(optimizer=OptimizerSpec(lr=1e-3))
ppo = PPO(actor=actor, critic=critic, mini_batch_size=64, critic_warmup_steps=3)
trainer = pl.Trainer(
    strategy=Colocated(),
    accelerator="cpu",  # of the process of the trainer
    max_steps=20,
    log_every_n_steps=1,
    default_root_dir="runs/ppo",
)
trainer.fit(ppo, datamodule=TaskData(batch_size=128))
