"""Reward and Cost on one worker: functions, models, both, steps, and services."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForSequenceClassification, GenerationConfig, PreTrainedTokenizerFast

from rlhf_lightning.controller import Batch, Worker, WorkerGroup
from rlhf_lightning.controller.device import Placement
from rlhf_lightning.data.tokenizer import load_tokenizer
from rlhf_lightning.parallel import ParallelLayout, World
from rlhf_lightning.rewards import RETRIES, HTTPOptions
from rlhf_lightning.spec import EMBEDDED_DIRECTORY, ModelSpec, Sampling
from rlhf_lightning.workers import Actor, Cost, Reward, Settings
from rlhf_lightning.workers.retelling import Retelling
from tests.unit.algos.small import write_other
from tests.unit.controller.devices import Devices
from tests.unit.data.conftest import write_spacing
from tests.unit.rewards.services import LENGTHS, Answer, service

T = TypeVar("T", Reward, Cost)
STEPS: Literal["steps"] = "steps"
RESPONSES = ["ab\nc", "no\n", "", "abcdefg"]
PROMPT, WIDTH = "Q:", 8
GAP = 3
"""In the last row the token at this place is context: it is read, and does not count."""


def batch(responses: list[str] = RESPONSES) -> dict[str, Tensor]:
    """Prompts of two tokens, responses that end in <eos> where there is room, the last one with a gap."""
    tokenizer = load_tokenizer("embedded")
    ids = torch.zeros(len(responses), WIDTH, dtype=torch.int64)
    mask = torch.zeros(len(responses), WIDTH, dtype=torch.bool)
    for row, text in enumerate(responses):
        tokens = torch.tensor([*tokenizer.encode(text), 258][:WIDTH])
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, bool(text)
    mask[-1, GAP] = False
    prompt = torch.tensor(tokenizer.encode(PROMPT))
    return {
        "prompt_ids": prompt.repeat(len(responses), 1),
        "prompt_mask": torch.ones(len(responses), len(prompt), dtype=torch.bool),
        "response_ids": ids,
        "response_mask": mask,
    }


def with_raw_rows(rows: dict[str, Tensor]) -> Batch:
    """The columns on the controller, with raw rows."""
    raw: list[object] = [{"prompt": PROMPT, "answer": "abc"} for _ in rows["response_ids"]]
    return Batch.of(rows | {"rows": raw})


def compute(role: Reward | Cost, rows: dict[str, Tensor], *, ranks: int = 1) -> Tensor:
    """Call a role on devices, as an algorithm does."""
    if isinstance(role, Cost):
        return on_devices(role, ranks).compute_cost(with_raw_rows(rows))["costs"]
    return on_devices(role, ranks).compute_reward(with_raw_rows(rows))["scores"]


def on_devices(role: T, ranks: int, *, offload: bool = False) -> T:
    """Build a role on devices of this process, which put it away between calls if asked; bind it to them."""
    devices, layout = Devices(ranks), ParallelLayout(d=ranks)
    whole = role.following(ModelSpec()).located().seeded(0)
    places = tuple(range(ranks))
    for part in devices.parts:
        part.device.offload = offload
        part.device.world = World(part.device.rank, torch.device("cpu"), {places: None})
        part.device.host("judge", Placement(replace(whole), layout, places, Settings()))
    return whole.bound(WorkerGroup("judge", devices, layout, places))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a random head that is large enough to see."""
    directory = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = AutoModelForSequenceClassification.from_pretrained(EMBEDDED_DIRECTORY, num_labels=1)
        torch.nn.init.normal_(network.score.weight, std=0.5)
        network.save_pretrained(directory)
    return directory


def after_each_token(model: Path, rows: dict[str, Tensor]) -> Tensor:
    """What plain transformers gives after each valid response token, a row at a time; 0 elsewhere."""
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    found = torch.zeros(rows["response_mask"].shape)
    for row in range(len(found)):
        ids = torch.cat([rows["prompt_ids"][row], rows["response_ids"][row]])[None]
        with torch.no_grad():
            hidden = network.base_model(input_ids=ids, use_cache=False).last_hidden_state
            found[row] = network.score(hidden)[0, rows["prompt_ids"].shape[1] :, 0]
    return torch.where(rows["response_mask"], found, 0.0)


def places(*pairs: tuple[int, int, float]) -> Tensor:
    """[4, WIDTH] float32 with numbers at (row, place)."""
    result = torch.zeros(len(RESPONSES), WIDTH)
    for row, place, value in pairs:
        result[row, place] = value
    return result


LAST = (4, 3, None, 7)
"""Place of the last valid token of each row."""


def test_functions_score_at_the_last_valid_token() -> None:
    got = compute(Reward(functions={"length": 256.0}), batch())
    # The text of the last row has the character in the gap, which others have said.
    assert got.equal(places((0, 4, 4.0), (1, 3, 3.0), (3, 7, 7.0)))
    assert got.dtype == torch.float32


def test_without_a_model_there_is_nothing_to_put_away() -> None:
    role = on_devices(Reward(functions={"length": 256.0}), 1, offload=True)
    for _ in range(2):
        assert role.compute_reward(with_raw_rows(batch()))["scores"].sum() == 14


def test_a_rank_without_rows_asks_nobody() -> None:
    with service(LENGTHS) as asked:
        assert compute(Reward(functions=asked.url), batch(["ab"]), ranks=2).sum(1).tolist() == [2.0]
        assert len(asked.contents) == 1


def test_a_cost_scores_the_same_way_under_its_own_name() -> None:
    got = compute(Cost(functions={"too_long": 2.0}), batch())
    assert got.equal(places((0, 4, 2.0), (3, 7, 2.0)))


def test_a_model_scores_the_last_valid_token_and_functions_are_added(model: Path) -> None:
    rows = batch()
    values = after_each_token(model, rows)
    expected = places(*((r, p, float(values[r, p])) for r, p in enumerate(LAST) if p is not None))
    assert expected.abs().sum() > 0.1
    torch.testing.assert_close(compute(Reward(path=str(model)), rows), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(compute(Cost(path=str(model)), rows), expected, atol=1e-5, rtol=1e-5)
    both = compute(Reward(path=str(model), functions={"length": 256.0}), rows)
    more = places((0, 4, 4.0), (1, 3, 3.0), (3, 7, 7.0))
    torch.testing.assert_close(both, expected + more, atol=1e-5, rtol=1e-5)


def in_other_numbers(model: Path, directory: Path) -> str:
    """The same model with a tokenizer that numbers the tokens otherwise."""
    write_other(directory, 1)
    network = AutoModelForSequenceClassification.from_pretrained(model)
    mine, theirs = (load_tokenizer(path).get_vocab() for path in ("embedded", str(directory)))
    weight = network.get_input_embeddings().weight.data
    weight[[theirs[token] for token in mine]] = weight[list(mine.values())].clone()
    network.save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_with_another_tokenizer_reads_what_was_said(model: Path, tmp_path: Path, ranks: int) -> None:
    rows = batch([*RESPONSES, "cut off!"])
    other = in_other_numbers(model, tmp_path)
    expected = compute(Reward(path=str(model)), rows)
    assert (expected.sum(1).abs() > 0.05).tolist() == [True, True, False, True, True]
    torch.testing.assert_close(compute(Reward(path=other), rows, ranks=ranks), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(compute(Cost(path=other), rows, ranks=ranks), expected, atol=1e-5, rtol=1e-5)
    first = {name: column[:1] for name, column in rows.items()}
    alone = compute(Reward(path=other), first, ranks=ranks)  # the second rank has none
    torch.testing.assert_close(alone, expected[:1], atol=1e-5, rtol=1e-5)


def write_words(directory: Path) -> str:
    """A tokenizer that begins words with a space and strips that of a text, as Llama 2's."""
    characters = ["<s>", "</s>", "<stop>", "\u2581", *(chr(code) for code in range(97, 123))]
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        additional_special_tokens=["<stop>"],
    )
    fast.save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("also_ends", [False, True])
@pytest.mark.parametrize(("last", "ends"), [([1], {False, True}), ([2], {True}), ([], set())])
def test_a_model_is_told_a_response_as_it_stands_behind_its_prompt(
    tmp_path: Path, last: list[int], ends: set[bool], *, also_ends: bool
) -> None:
    """Cut off, ended, or ended by a token that generation_config.json names, where it does."""
    path = write_words(tmp_path / f"words-{also_ends}")
    if also_ends:
        GenerationConfig(eos_token_id=[1, 2]).save_pretrained(path)
    tokenizer = load_tokenizer(path)
    prompt, response = tokenizer.encode("the capital is"), [*tokenizer.encode("paris"), *last]
    assert tokenizer.decode(response, skip_special_tokens=True) == "paris"
    columns = {
        "prompt_ids": torch.tensor([[0, 0, *prompt]]),
        "prompt_mask": torch.tensor([[False, True] + [True] * len(prompt)]),
        "response_ids": torch.tensor([[*response, 9]]),
        "response_mask": torch.tensor([[True] * len(response) + [False]]),
    }
    rows = TensorDict({**columns, "rows": NonTensorStack({"prompt": "the capital is"})}, batch_size=1)
    if last == [2] and not also_ends:
        stopping = Actor(path=path, sampling=Sampling(stop_token_ids=(2,)))
        role = Reward(path="embedded").following(stopping)
        assert (role.tokenizer, role.stop_token_ids) == (path, (2,))
        told = role.retold(rows, Retelling(tokenizer=load_tokenizer("embedded")))
        assert int(told["response_ids"]) == 258
    role = Reward(path="embedded", tokenizer=path)
    told = role.retold(rows, Retelling(tokenizer=load_tokenizer("embedded")))
    ids = [*told["prompt_ids"][0].tolist(), *told["response_ids"][0].tolist()]
    assert ids == [*b"the capital is paris", *([258] if also_ends in ends else [])]


def test_a_prompt_that_ends_within_a_character_is_not_told_again() -> None:
    """With the rest of the character its bytes read otherwise: the response is then read alone."""
    prompt, response = torch.tensor([[*b"ros\xc3"]]), torch.tensor([[*b"\xa9s"]])
    columns = {
        "prompt_ids": prompt,
        "prompt_mask": prompt > 0,
        "response_ids": response,
        "response_mask": response > 0,
    }
    rows = TensorDict({**columns, "rows": NonTensorStack({"prompt": "ros"})}, batch_size=1)
    role = Reward(path="embedded", tokenizer="embedded")
    told = role.retold(rows, Retelling(tokenizer=load_tokenizer("embedded")))
    ids = [*told["prompt_ids"][0].tolist(), *told["response_ids"][0].tolist()]
    assert bytes(ids).decode() == "ros\ufffds"


def test_what_each_part_of_a_score_says(model: Path) -> None:
    rows, nan = batch(), torch.nan
    raw: list[object] = [
        {"prompt": PROMPT, "answer": "abc", "data_source": name} for name in ("a", "b", "a", "b")
    ]
    role = Reward(path=str(model), functions={"length": 256.0}, by_source={"b": {"too_long": 2.0}}, clip=0.01)
    found = on_devices(role, 2).compute_reward(Batch.of(rows | {"rows": raw}))["score_parts"]
    assert role.parts == ("length", "too_long", "model")
    lengths, long = torch.tensor([4 / 256, nan, 0.0, nan]), torch.tensor([nan, 0.0, nan, 1.0])
    torch.testing.assert_close(found[:, 0], lengths, equal_nan=True)
    torch.testing.assert_close(found[:, 1], long, equal_nan=True)
    alone = compute(Reward(path=str(model)), rows).sum(dim=1)
    torch.testing.assert_close(found[:, 2], alone, atol=1e-5, rtol=1e-5)


def test_a_process_reward_model_scores_the_end_of_each_step(model: Path) -> None:
    rows = batch()
    values = after_each_token(model, rows)
    # "ab\n" "c<eos>", "no\n" (its <eos> is no step), nothing, and a row without a separator
    ends = places((0, 2, 1.0), (0, 4, 1.0), (1, 2, 1.0), (3, 7, 1.0))
    got = compute(Reward(path=str(model), per_token=STEPS, step_weight=0.5), rows)
    torch.testing.assert_close(got, 0.5 * torch.sigmoid(values) * ends, atol=1e-5, rtol=1e-5)
    logits = Reward(
        path=str(model), per_token=STEPS, step_activation="none", functions={"length": 256.0}, separator="o"
    )
    ends = places((0, 4, 1.0), (1, 1, 1.0), (3, 7, 1.0))
    outcome = places((0, 4, 4.0), (1, 3, 3.0), (3, 7, 7.0))
    torch.testing.assert_close(compute(logits, rows), values * ends + outcome, atol=1e-5, rtol=1e-5)


def test_the_steps_of_a_response_are_one_part_of_its_score(model: Path) -> None:
    rows = batch()
    role = Reward(path=str(model), per_token=STEPS, step_weight=0.5, functions={"length": 256.0})
    found = on_devices(role, 2).compute_reward(with_raw_rows(rows))["score_parts"]
    assert role.parts == ("length", "model")
    torch.testing.assert_close(found[:, 0], torch.tensor([4.0, 3.0, 0.0, 7.0]) / 256)
    unweighted = compute(Reward(path=str(model), per_token=STEPS), rows).sum(dim=1)
    torch.testing.assert_close(found[:, 1], unweighted, atol=1e-5, rtol=1e-5)


def test_no_step_ends_where_nothing_counts(model: Path) -> None:
    rows = batch([*RESPONSES, "x\n\n"])
    rows["response_mask"][-1] = False
    role = Reward(path=str(model), per_token=STEPS)
    assert compute(role, rows)[-1].equal(torch.zeros(WIDTH))
    found = on_devices(role, 1).compute_reward(with_raw_rows(rows))["score_parts"]
    assert found.shape == (5, 1)
    assert found[-1] == 0


def test_a_separator_with_a_space_is_found_where_a_token_alone_loses_it(model: Path, tmp_path: Path) -> None:
    rows = {name: column[:1] for name, column in batch().items()}
    ids = [3, 4, 1, 3, 4]  # "ab ab"
    rows["response_ids"][0, : len(ids)], rows["response_mask"][0] = torch.tensor(ids), False
    rows["response_mask"][0, : len(ids)] = True
    path = write_spacing(tmp_path / "spacing", "\nab")
    got = compute(Reward(path=str(model), per_token=STEPS, tokenizer=path, separator="b "), rows)
    assert got.nonzero()[:, 1].tolist() == [2, 4]


@pytest.mark.parametrize("kind", [Reward, Cost])
def test_a_model_that_gives_no_number_is_named(
    model: Path, tmp_path: Path, kind: type[Reward] | type[Cost]
) -> None:
    network = AutoModelForSequenceClassification.from_pretrained(model)
    torch.nn.init.constant_(network.score.weight, torch.nan)
    network.save_pretrained(tmp_path)
    judge = kind(path=str(tmp_path), functions={"length": 1.0}, clip=3.0)
    said = rf"{judge.kind}\.path='{tmp_path}': row 1 of the batch got nan, .* its prompt begins 'Q:'\."
    with pytest.raises(RuntimeError, match=said):
        compute(judge, batch(["", "ab"]))


def test_scores_are_limited() -> None:
    weights = {"length": 256.0, "exact_match": -100.0}
    assert compute(Reward(functions=weights, clip=3.5), batch(["ab", "abc", "abcde"])).sum(1).tolist() == [
        2.0,
        -3.5,
        3.5,
    ]
    assert compute(Cost(functions=weights, clip=3.5), batch(["abc", "abcde"])).sum(1).tolist() == [-3.5, 3.5]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_answer_that_was_cut_off_scores_less(ranks: int) -> None:
    """As TRL's PPO: scores[~contain_eos_token] -= missing_eos_penalty. A limit is of what was scored."""
    rows = batch(["ab", "abcde", "a", "abcdefgh"]) | {
        "row_truncated": torch.tensor([False, True, False, True])
    }
    plain = Reward(functions={"length": 256.0}, clip=4.0)
    expected = compute(plain, rows).sum(1)
    for row in range(4):
        expected[row] -= 1.5 if rows["row_truncated"][row] else 0.0
    found = compute(replace(plain, truncated_penalty=1.5), rows, ranks=ranks)
    assert found.sum(1).tolist() == expected.tolist() == [2.0, 2.5, 1.0, 2.5]
    assert (found != 0).sum(1).tolist() == [1, 1, 1, 1]  # at the last token, like the rest of the score
    with pytest.raises(ValueError, match=r"compute_reward reads .* no \['row_truncated'\]"):
        compute(replace(plain, truncated_penalty=1.5), batch())


def test_a_service_that_recovers_loses_no_score_and_is_counted() -> None:
    with service(Answer(status=503), Answer(status=503), LENGTHS) as asked:
        RETRIES.clear()
        reward = on_devices(Reward(functions=asked.url, http=HTTPOptions(backoff_s=0.01)), 1)
        scores = reward.compute_reward(with_raw_rows(batch(["ab", "abcd"])))["scores"]
        assert scores.sum(1).tolist() == [2.0, 4.0]
        assert reward.count_retries().fetch() == [2]
        assert asked.contents[-1]["responses"] == ["ab", "abcd"]


@pytest.mark.parametrize("kind", [Reward, Cost])
def test_a_service_that_is_down_names_field_and_address(kind: type[Reward | Cost]) -> None:
    with service(Answer(status=500)) as asked:
        judge = kind(functions=asked.url, http=HTTPOptions(retries=0))
        with pytest.raises(
            RuntimeError, match=rf"judge\[rank 0, .*compute_[a-z]*: judge function {asked.url}: "
        ):
            compute(judge, batch())
        assert len(asked.contents) == 1


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"reward\.per_token=steps: a model .*--algo\.reward\.path"):
        Reward(per_token=STEPS).check()
    with pytest.raises(ValueError, match=r"reward\.separator='': nothing stands"):
        Reward(path="x", per_token=STEPS, separator="").check()
    with pytest.raises(ValueError, match=r"reward\.step_weight=2\.0: nothing reads it, as no model scores"):
        Reward(path="x", step_weight=2.0).check()
    with pytest.raises(ValueError, match=r"reward\.truncated_penalty=-1\.0: .* Type 1\.0"):
        Reward(truncated_penalty=-1.0).check()
    with pytest.raises(ValueError, match=r"cost\.clip=0\.0"):
        Cost(clip=0.0).check()
    with pytest.raises(ValueError, match=r"reward\.clip=nan"):
        Reward(clip=float("nan")).check()


@pytest.mark.parametrize("kind", [Reward, Cost])
@pytest.mark.parametrize(
    ("layout", "answers"),
    [(ParallelLayout(t=2), [True, False]), (ParallelLayout(2, 2, 1), [False, False, True, False])],
    ids=["shards", "stages"],
)
def test_functions_are_asked_once_a_replica(
    kind: type[Reward] | type[Cost], layout: ParallelLayout, answers: list[bool]
) -> None:
    """On the first shard of the last stage: there a model has its numbers."""
    found, raw = [], NonTensorStack(*[{"prompt": PROMPT}] * len(RESPONSES))
    for rank in range(layout.num_ranks):
        role = kind(functions="length", tokenizer="embedded")
        role.build(Worker(rank, layout, torch.device("cpu"), None, None, settings=Settings()))
        rows = TensorDict(batch(), batch_size=len(RESPONSES))
        if answers[rank]:  # the others are not given what functions read
            rows["rows"] = raw
        scores = role.compute_reward(rows) if isinstance(role, Reward) else role.compute_cost(rows)
        assert isinstance(scores, TensorDict)
        found.append(any(column.any() for column in scores.values()))
    assert found == answers
