"""Checks of tokenizers: whether all models and the data mean the same texts by the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_lightning.data import row_data, second_data
from rlhf_lightning.data.record import are_messages
from rlhf_lightning.data.tokenizer import highest_token, numbered_alike, reads
from rlhf_lightning.engines import has_tokenizer, located, num_tokens
from rlhf_lightning.retold import retold
from rlhf_lightning.rewards import PREFLIGHT_RESPONSE
from rlhf_lightning.workers import Judge, Reward, Role, reads_ids

if TYPE_CHECKING:
    from rlhf_lightning.algorithm import RLHFAlgorithm
    from rlhf_lightning.workers.retelling import Retelling


def check_tokenizers(algorithm: RLHFAlgorithm) -> None:
    """Refuse models, judges and rows that mean other texts, or none, by the main model's token ids."""
    _check_texts(algorithm)
    _check_models(algorithm)
    _check_rows(algorithm)


def _check_texts(algorithm: RLHFAlgorithm) -> None:
    """Refuse a judge's tokenizer that makes other texts of the answers than the main model's."""
    main = algorithm.main_model
    for name, role in algorithm.roles().items():
        if not isinstance(role, Judge) or role.tokenizer == main.path or not has_tokenizer(main):
            continue
        if not reads(main.path, role.tokenizer, my_vocab=num_tokens(main), their_vocab=None):
            raise ValueError(
                f"{name}.tokenizer={role.tokenizer!r}: it makes other texts of the ids of {main.path!r}. "
                f"Take one that numbers tokens as that does, or leave {name}.tokenizer out."
            )


def _check_models(algorithm: RLHFAlgorithm) -> None:
    """Refuse models that would read the actor's token ids, or it the data's, as other texts.

    A judge of whole responses may have another tokenizer: responses are re-encoded for it, which is tried out
    here on the data's messages. So may a role whose class says `own_tokens`, which is given texts.
    """
    main, trainer = algorithm.main_model, algorithm.trainer
    for part in filter(None, (row_data(trainer), second_data(trainer))):
        if part.tokenizer is not None:
            _check_data_tokenizer(f"{part.typed}.tokenizer", located(part.tokenizer), main)
    for name, role in algorithm.roles().items():
        if not role.path or role.own_tokens or reads_ids(role, of=main):
            continue
        retelling = role.retelling if isinstance(role, Judge) else None
        if retelling is None:
            raise ValueError(_misread(name, role, main))
        _try_retelling(algorithm, f"{name}.path={role.path!r}", retelling)


def _check_data_tokenizer(option: str, path: str, main: Role) -> None:
    """Refuse rows whose token ids are other texts to the main model, or are none of its tokens."""
    if path == main.path or not has_tokenizer(main):
        return
    if not reads(path, main.path, my_vocab=None, their_vocab=num_tokens(main)):
        alike, total = numbered_alike(path, main.path)
        raise ValueError(
            f"{option}={path!r}: {main.path!r} would read these token ids, has {num_tokens(main)} tokens and "
            f"knows {alike} of {total} by the same number. Leave {option} out: rows are then encoded for the "
            "model."
        )


def _misread(name: str, role: Role, main: Role) -> str:
    """The error for a model that cannot read the main model's token ids, and what to do about it."""
    alike, total = numbered_alike(main.path, role.path)
    highest, has = highest_token(main.path, vocab=num_tokens(main)), num_tokens(role)
    over = f"; they go up to {highest}, and the model has {has} tokens" if has and highest >= has else ""
    fix = "Take a model with the same tokenizer"
    if isinstance(role, Reward) and role.scores_steps:
        fix += ", or score whole responses (per_token outcome)"
    elif not isinstance(role, Judge):
        fix += ", own_tokens = True in its class where step makes its prompts of texts" * (role.head == "lm")
        fix += f", or type --algo.{name}.path '' to begin with the weights of {main.path!r}"
    return (
        f"{name}.path={role.path!r}: reads the token ids of {main.path!r}, and its tokenizer knows {alike} "
        f"of {total} by the same number{over}. {fix}."
    )


def _try_retelling(algorithm: RLHFAlgorithm, whose: str, retelling: Retelling) -> None:
    """Render one example of each sequence of message roles in the data, as the judge will read it."""
    data = row_data(algorithm.trainer)
    rows = [] if data is None else [*data.train_rows, *data.held_out_rows]
    of_roles = {
        tuple(message["role"] for message in messages): messages
        for row in rows
        if are_messages(messages := row.get("prompt_messages"))
    }
    for messages in of_roles.values():
        with retold(lambda said: f"{whose}: {said}"):
            retelling.rows([{"prompt_messages": messages}], [PREFLIGHT_RESPONSE], ended=[True])


def _check_rows(algorithm: RLHFAlgorithm) -> None:
    """Refuse rows with tokens that the main model has no embeddings for: some engines would make numbers up.

    Its tokenizer may have more tokens than it: Gemma 3's smallest model has none for images.
    """
    main = algorithm.main_model
    size = num_tokens(main)
    if size is None or not has_tokenizer(main) or highest_token(main.path, vocab=None) < size:
        return
    for part in filter(None, (row_data(algorithm.trainer), second_data(algorithm.trainer))):
        part.check_tokens(size)
