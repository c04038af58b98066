"""`rlhf fit | validate | predict | export | map | calibrate | reshard`: Lightning's command line.

Algorithms, strategies and data modules are given by short name (`--algo ppo`) or by the class path of your
own, in flags and in YAML. With neither a configuration nor data, the task that ships in the package runs.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import signal
import sys
from argparse import Action, ArgumentError
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace, set_parsing_settings
from jsonargparse._actions import _ActionConfigLoad
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, RichProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import LightningEnum
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rlhf_lightning import __version__
from rlhf_lightning.algorithm import RLHFAlgorithm
from rlhf_lightning.callbacks import LastCheckpoint, Progress, Trace
from rlhf_lightning.callbacks.last_checkpoint import searched
from rlhf_lightning.callbacks.progress import early_stops
from rlhf_lightning.callbacks.save_config import SaveConfig
from rlhf_lightning.commands import COMMANDS
from rlhf_lightning.controller.connection import TERMINATED
from rlhf_lightning.names import FOLDERS, choices, class_path, imported
from rlhf_lightning.options import option_names
from rlhf_lightning.output import check_output, keepers, keeps_last, leaves_files, whole
from rlhf_lightning.retold import retold
from rlhf_lightning.spec import CHECKPOINT
from rlhf_lightning.stores import check_local
from rlhf_lightning.strategy import Strategy
from rlhf_lightning.usage import option_error, option_errors
from rlhf_lightning.words import as_handed_on, chosen, config_files, resolved
from rlhf_lightning.yaml_files import write_names

DECIDED_BY_STRATEGY = {
    "strategy": "The strategy is an option of its own: --strategy NAME.",
    "accelerator": "The strategy computes on GPUs if there are any, else on CPUs: leave the option out.",
    "devices": "The strategy divides them: --strategy.devices N.",
    "num_nodes": "The nodes are those of the Ray cluster: --strategy.address HOST:PORT, or leave it out.",
    "precision": "Each model has a type: --algo.actor.dtype bfloat16.",
    "sync_batchnorm": "The strategy divides the models: leave the option out.",
    "use_distributed_sampler": "The strategy divides each batch: leave the option out.",
    "barebones": "It leaves no room for metrics. Type --trainer.logger false "
    "--trainer.enable_checkpointing false --trainer.enable_progress_bar false.",
}
"""Trainer options that the strategy decides, or no command can have, and what to type instead."""
STRICT = {"exit_on_error": False}
"""Options of every parser: errors are raised, not printed."""
TRAINER_COMMANDS = {
    "fit": "Train.",
    "validate": "Answer and score the held-out prompts, with the models of --ckpt_path or of their paths.",
    "predict": "Answer the prompts; the answers go to <root>/predictions.jsonl.",
}
"""Commands that are methods of the trainer, and what the help says of them."""
PREDICTED = {"prompts": "prompt", "responses": "response", "truncated": "truncated"}
"""What `predict_step` gives lists of, and how a line of predictions.jsonl calls each."""
TRAINER_DEFAULTS = {"default_root_dir": "runs", "enable_model_summary": False, "log_every_n_steps": 1}
"""Options of the trainer that are not Lightning's defaults."""
HELP = {
    "prog": "rlhf",
    "version": __version__,
    "description": "RLHF as a Lightning trainer. `rlhf fit --algo ppo --strategy colocated` trains the model "
    "that ships with it; `rlhf fit --algo.help ppo` lists the options of an algorithm.",
    "epilog": "Without a trainer: `rlhf export CHECKPOINT OUT` writes a Hugging Face directory, `rlhf map` "
    "finds where models run best on a cluster, `rlhf calibrate FILE` measures this machine for it, `rlhf "
    "reshard` shows what moving the actor from training to generation costs.",
}
"""What `rlhf --help` and `--version` say."""
IGNORED_MESSAGES = ("Tip: For seamless cloud", "GPU available: ", "TPU available: ")
"""Parts of messages of Lightning about products, or about devices: the strategy uses them, no Trainer."""


class Parser(LightningArgumentParser):
    """A parser that takes no abbreviated options, and no single value for several options in a file.

    The parsers of a class's options are of its type, too.
    """

    _inner_parser = False  # set of the parsers of parts, which jsonargparse keeps
    _defaults_of_part: Namespace | None = None

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})  # type: ignore[arg-type]

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *others: object, **options: object
    ) -> Namespace:
        """As jsonargparse does, with None as null, which it hands on to the parsers of parts as None."""
        words = args and [re.sub(r"^(--[\w.+-]+=)?None$", r"\1null", word) for word in args]
        if "namespace" in options:  # of a part
            words = words and [as_handed_on(word) for word in words]
        return super().parse_args(words, *others, **options)  # type: ignore[arg-type]

    def get_defaults(self, *args: object, **options: object) -> Namespace:
        """As jsonargparse does, which works out those of the same part for each option anew."""
        found = self._defaults_of_part or super().get_defaults(*args, **options)  # type: ignore[arg-type]
        if self._inner_parser:
            self._defaults_of_part = found
        return found.clone()

    def _check_value_key(
        self, action: Action, value: object, key: str, cfg: Namespace | None, append: bool = False
    ) -> object:
        """Refuse a number or null where options belong, which would pass for them until they are read."""
        if isinstance(action, _ActionConfigLoad) and not isinstance(value, str | dict | Namespace):
            raise TypeError(f'Parser key "{key}": Unable to load config "{value}"')
        return super()._check_value_key(action, value, key, cfg, append=append)


class _End(LambdaCallback):
    """Of a class of its own: a module's `configure_callbacks` replaces those of the same class."""


class CommandLine(LightningCLI):
    """LightningCLI with `algo`, `strategy` and `data` instead of `model` and `trainer.strategy`."""

    trainer: Trainer
    model: RLHFAlgorithm
    datamodule: LightningDataModule

    def __init__(self, arguments: Sequence[str]) -> None:
        # Docstrings below fields are read from the sources only for help, since it takes half a second.
        set_parsing_settings(docstring_parse_attribute_docstrings=any("help" in word for word in arguments))
        write_names(LightningEnum)  # such as Timer's interval, else of no type that could be read
        # Each parser takes a sixth of a second: none for a command that was not typed.
        self._commands = [word for word in arguments[:1] if word in TRAINER_COMMANDS] or [*TRAINER_COMMANDS]
        super().__init__(
            RLHFAlgorithm,
            args=resolved(arguments),
            seed_everything_default=0,
            subclass_mode_model=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=SaveConfig,
            save_config_kwargs={"given": config_files(arguments)},
            parser_class=Parser,
            parser_kwargs=STRICT
            | HELP
            | {name: STRICT | {"description": TRAINER_COMMANDS[name]} for name in self._commands},
            trainer_defaults=dict(TRAINER_DEFAULTS),
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The command that was typed, or all: methods of the trainer, and arguments that are no options."""
        loaders = {"datamodule", "dataloaders", "train_dataloaders", "val_dataloaders"}
        return dict.fromkeys(self._commands, {"model", "weights_only", "return_predictions"} | loaders)

    def _add_subcommands(self, parser: LightningArgumentParser, **options: object) -> None:
        """Add the commands, and let the list of them say what they do here."""
        super()._add_subcommands(parser, **options)
        assert parser._subcommands_action is not None
        for listed in parser._subcommands_action._choices_actions:
            listed.help = TRAINER_COMMANDS[listed.dest]

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add `trainer`, `algo`, `strategy` and `data`."""
        for option in FOLDERS:
            choices(option)  # imported, so that help lists all
        parser.add_class_arguments(
            Trainer,
            "trainer",
            instantiate=False,
            sub_configs=True,
            fail_untyped=False,
            skip=set(DECIDED_BY_STRATEGY),
        )
        parser.set_defaults({f"trainer.{key}": value for key, value in self.trainer_defaults.items()})
        parser.add_subclass_arguments(RLHFAlgorithm, "algo", fail_untyped=False, required=True)
        strategies = importlib.import_module(FOLDERS["strategy"])
        default = {"class_path": class_path("strategy", strategies.DEFAULT)}
        parser.add_subclass_arguments(Strategy, "strategy", fail_untyped=False, default=default)
        parser.add_subclass_arguments(LightningDataModule, "data", fail_untyped=False, required=True)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add options that are the command's own."""
        parser.add_argument(
            "--trace", type=str, default="", help="file for every call of every device; Perfetto opens it"
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line.

        Raises:
            ValueError: an option is unknown or has a wrong value.
        """
        known = ", ".join([*TRAINER_COMMANDS, *COMMANDS])
        first = args[0] if isinstance(args, list) and args else ""
        if first.startswith("-") and first not in ("-h", "--help", "--version"):
            raise ValueError(f"the first word is not a command. Choose from {known}.")
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as err:
            if "subcommand" in (said := str(err)):
                typed = re.search("choice: '(.*?)'", said)
                lacking = f"{typed[1]!r} is not a command" if typed else "no command was typed"
                raise ValueError(f"{lacking}. Choose from {known}.") from err
            words = args if isinstance(args, list) else []
            elsewhere = {f"trainer.{name}": said for name, said in DECIDED_BY_STRATEGY.items()}
            placed = _chosen(words, "strategy").values()
            for name in [kind.__name__ for kind in placed if "devices" not in option_names(kind)]:
                elsewhere["trainer.devices"] = f"{name} has one: --strategy colocated --strategy.devices N."
            owners = {"trainer": Trainer} | _chosen(words, "algo") | _chosen(words, "data")
            raise ValueError(option_errors(str(err), owners, elsewhere=elsewhere)) from err

    def instantiate_classes(self) -> None:
        """Make the algorithm, the data and the trainer with its strategy.

        Raises:
            ValueError: one of them refuses its options.
        """
        with retold(lambda said: option_error(said, {})):
            self.config_init = self.parser.instantiate_classes(self.config)
        self.model = self._get(self.config_init, "algo")
        self.datamodule = self._get(self.config_init, "data")
        if self.subcommand != "fit":  # whose config.yaml may lie in the same directory
            self.save_config_kwargs["config_filename"] = f"{self.subcommand}.yaml"
        strategy = self._get(self.config_init, "strategy")
        options = self._get(self.config_init, "trainer")
        given = options.get("callbacks") or []
        own = [*given] if isinstance(given, list) else [given]  # a copy: the trainer adds its own to the list
        # Before the trainer, which asks for the package of such a store.
        check_local(options.default_root_dir, option="trainer.default_root_dir")
        self.trainer = self.instantiate_trainer(strategy=strategy, accelerator="cpu", devices=1)
        self._show_progress(own)
        self._let_wandb_go_on()
        if self.subcommand == "fit":
            end = _End(teardown=lambda *_, stage: self._say_end())
            self.trainer.callbacks.append(end)  # type: ignore[attr-defined]
        if options.get("enable_checkpointing") is not False:
            self._keep_last_checkpoint(own)
        if path := self._get(self.config_init, "trace"):
            self.trainer.callbacks.append(Trace(path))  # type: ignore[attr-defined]

    def _show_progress(self, own: Sequence[object]) -> None:
        """Replace a progress bar that Lightning has chosen by one that counts iterations."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        for place, theirs in enumerate(callbacks):
            if isinstance(theirs, RichProgressBar) and theirs not in own:
                callbacks[place] = Progress()

    def _let_wandb_go_on(self) -> None:
        """Let a run of wandb with a name, maybe of WANDB_RUN_ID, go on: the parser's null would begin anew.

        Lightning's `allow` stands in its place, where neither an option nor a variable says how to go on.
        """
        ways = ("resume", "resume_from", "fork_from")
        if any(f"WANDB_{way.upper()}" in os.environ for way in ways):
            return
        for logger in self.trainer.loggers:
            options = logger._wandb_init if isinstance(logger, WandbLogger) else {}
            if all(options.get(way) is None for way in ways):
                options["resume"] = "allow"

    def _keep_last_checkpoint(self, own: Sequence[object]) -> None:
        """Keep <root>/checkpoints/last.ckpt, for `--ckpt_path last`, beside the user's own checkpoints."""
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        for theirs in self.trainer.checkpoint_callbacks:
            if theirs not in own:  # Lightning's choice where there is none
                callbacks.remove(theirs)
        if not any(isinstance(callback, LastCheckpoint) for callback in own):
            callbacks.append(LastCheckpoint(Path(self.trainer.default_root_dir) / "checkpoints"))

    def before_fit(self) -> None:
        """Begin anew, with a message, where `--ckpt_path last` finds nothing, as in a script's first job."""
        if missing := self._missing_last():
            sys.stderr.write(f"rlhf: {missing} The run begins anew.\n")
            self.config_init[self.subcommand]["ckpt_path"] = None
        self._check_slurm_checkpoint()

    def _say_end(self) -> None:
        """Say what stopped the run early, where the newest checkpoint is, and how its model is exported."""
        sys.stderr.write("".join(f"rlhf: {said}\n" for said in early_stops(self.trainer)))
        done = self.trainer.global_step
        kept = [c for c in self.trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint)]
        if not kept or not done or not leaves_files(self.trainer):
            return
        said = f"nothing was trained or written: no iteration was left after {done}, that of the checkpoint."
        if path := kept[0].best_model_path:
            said = f"wrote {path}; `rlhf export {path} OUT` exports its model."
        sys.stderr.write(f"rlhf: {said}\n")

    def _parse_ckpt_path(self) -> None:
        """Refuse a file as `--ckpt_path`, which is a directory: Lightning would read options from it."""
        given = Path(str(self.config[self.config.subcommand].get("ckpt_path") or ""))
        if given.is_file():
            inside = f" Type {given.parent}." if (given.parent / CHECKPOINT).is_file() else ""
            raise ValueError(f"--ckpt_path {given}: is a file, and a checkpoint a directory.{inside}")

    def before_validate(self) -> None:
        """Refuse `--ckpt_path last` without a checkpoint: an untrained model would be validated."""
        if missing := self._missing_last():
            raise ValueError(f"{missing} Type the path of one, or its run's --trainer.default_root_dir.")
        self._check_slurm_checkpoint()

    before_predict = before_validate

    def _check_slurm_checkpoint(self) -> None:
        """Refuse to resume by itself from the checkpoint that another job of Slurm left at its warning.

        In a job of Slurm, Lightning resumes from such a checkpoint unasked.
        """
        found = self.trainer._checkpoint_connector._hpc_resume_path
        given = self._get(self.config_init, "ckpt_path")
        if found and not given and SLURMEnvironment.detect() and "SLURM_RESTART_COUNT" not in os.environ:
            raise ValueError(
                f"{found}: an earlier job of Slurm was warned and has left this, and Lightning would go on "
                "from it. Type --ckpt_path last to do so, or another --trainer.default_root_dir."
            )

    def _missing_last(self) -> str:
        """The error for `--ckpt_path last` where there is no checkpoint; empty where there is one."""
        if self._get(self.config_init, "ckpt_path") != "last" or keeps_last(self.trainer):
            return ""
        found = [searched(Path(keeper.dirpath)) for keeper in keepers(self.trainer) if keeper.dirpath]
        return f"--ckpt_path last: {'; '.join(found) or 'nothing is kept with enable_checkpointing false'}."

    def predict(self, model: RLHFAlgorithm, ckpt_path: str | None = None, **_: object) -> None:
        """Answer the prompts; the answers go to <root>/predictions.jsonl.

        Raises:
            ValueError: no file can be written there, or nothing of what a `predict_step` gave.
        """
        out = Path(self.trainer.default_root_dir) / "predictions.jsonl"
        out.parent.mkdir(parents=True, exist_ok=True)
        check_output(self.trainer, out.parent, name="predictions.jsonl")
        if out.is_dir():
            raise ValueError(f"{out} is a directory. Move it, or type another --trainer.default_root_dir.")
        found = self.trainer.predict(model, datamodule=self.datamodule, ckpt_path=ckpt_path) or []
        if not found or not leaves_files(self.trainer):
            sys.stdout.write(f"predictions: {'not kept with fast_dev_run' if found else 'of no prompt'}\n")
            return
        with whole(out) as file:
            for batch in found:
                given = batch if isinstance(batch, dict) else {}
                there = {line: given[each] for each, line in PREDICTED.items() if each in given}
                if not there:
                    raise ValueError(
                        f"{type(model).__name__}.predict_step returned {[*given] or type(batch).__name__}. "
                        f"Return lists by name, of {', '.join(PREDICTED)} those that there are."
                    )
                for values in zip(*there.values(), strict=True):
                    file.write(json.dumps(dict(zip(there, values, strict=True))) + "\n")
        sys.stdout.write(f"predictions: {out}\n")


def _chosen(words: Sequence[str], option: str) -> dict[str, type]:
    """The class of an algorithm or a strategy, by its option; empty where none was chosen or imported."""
    found = imported(chosen(words, option))
    return {option: found} if found else {}


def _is_about_run(record: logging.LogRecord) -> bool:
    """False for messages of Lightning about products or about the devices of the controller."""
    return not any(part in record.getMessage() for part in IGNORED_MESSAGES)


def run(arguments: Sequence[str]) -> None:
    """Run a command of the trainer, which is the first of the arguments."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_about_run)
    try:
        CommandLine(arguments)
    except SystemExit as end:  # Lightning's code is 0, as if the run had ended well, and Ray's 1
        if isinstance(end, SIGTERMException) or TERMINATED.is_set():
            sys.exit(128 + signal.SIGTERM)
        raise
