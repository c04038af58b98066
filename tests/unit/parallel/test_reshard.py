"""The plans of the three planners: the paper's Table 2 by hand, and every number where it belongs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from rlhf_lightning.mapping import shapes
from rlhf_lightning.parallel import Generation, ParallelLayout, Sharded, even_stages
from rlhf_lightning.parallel.buckets import buckets
from rlhf_lightning.parallel.layout import Order
from rlhf_lightning.parallel.planners import PLANNERS, Overhead, PlannerName
from rlhf_lightning.parallel.reshard import RankPlan, ReshardPlan, reshard
from rlhf_lightning.parallel.weights import Stages, Weights, generation_stages
from tests.unit.parallel.masks import LAYERS, Mask, Masks, llama
from tests.unit.parallel.models import Case

SIZES = (1, 2, 4, 8)
LOOKED_AT = 4
"""Ranks of a plan whose every number is looked at."""
NAMES: tuple[PlannerName, ...] = ("hybridflow", "vanilla", "deepspeed-chat")
Row = tuple[tuple[int, int, int], tuple[int, int], int, tuple[int, int, int]]
"""(p, t, d), (pg, tg), bytes in bf16; then by hand what a rank receives with DeepSpeed-Chat and HybridFlow-V,
which are alike for d = 1, what it receives with HybridFlow, and what it then holds."""
FIGURE_14: dict[str, Row] = {
    "llama-7b": ((1, 8, 1), (1, 2), 13_476_831_232, (11_792_227_328, 5_053_811_712, 6_738_415_616)),
    "llama-13b": ((1, 8, 1), (1, 4), 26_031_728_640, (22_777_762_560, 3_253_966_080, 6_507_932_160)),
    "llama-34b": ((4, 8, 1), (1, 8), 67_487_940_608, (65_378_942_464, 6_326_994_432, 8_435_992_576)),
    "llama-70b": ((8, 8, 1), (1, 8), 137_953_296_384, (135_797_776_128, 15_088_641_792, 17_244_162_048)),
}


def layout_of(
    train: tuple[int, int, int], generate: tuple[int, int], planner: PlannerName, *, order: Order = "tpd"
) -> ParallelLayout:
    return ParallelLayout(*train, order=order, generation=Generation(*generate, PLANNERS[planner].rule))


def opaque(
    size_bytes: int, train: tuple[int, int, int], generate: tuple[int, int], planner: PlannerName
) -> ReshardPlan:
    layout = layout_of(train, generate, planner)
    return reshard(Weights.opaque(size_bytes, layout), layout, planner=planner)


def pairs() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """All (p, t) and the generation sizes that divide them."""
    for p, t, pg, tg in product(SIZES, repeat=4):
        if p % pg == 0 and t % tg == 0:
            yield (p, t), (pg, tg)


@pytest.mark.parametrize("name", FIGURE_14)
def test_table_2_in_the_layouts_of_figure_14(name: str) -> None:
    train, generate, size_bytes, (everything, volume, peak) = FIGURE_14[name]
    assert 2 * shapes.load(name).num_parameters == size_bytes
    part = size_bytes - everything
    expected = {
        "deepspeed-chat": Overhead(everything, size_bytes, part),
        "vanilla": Overhead(everything, size_bytes, part),
        "hybridflow": Overhead(volume, peak, 0),
    }
    for planner in NAMES:
        plan = opaque(size_bytes, train, generate, planner)
        assert plan.table == expected[planner]
        assert {rank.received_bytes for rank in plan.ranks} == {expected[planner].volume}
        assert {rank.sent_bytes for rank in plan.ranks} == {expected[planner].volume}
        assert {rank.peak_bytes for rank in plan.ranks} == {expected[planner].peak}
        redundant = {rank.redundant_bytes for rank in plan.ranks}
        if planner == "vanilla":  # where tg = t, counting too leaves all ranks their training shards
            assert redundant == ({0} if train[1] == generate[1] else {0, part})
        else:
            assert redundant == {expected[planner].redundant}


def test_the_vanilla_rule_has_some_ranks_hold_their_shard_twice() -> None:
    """Figure 8 (a): ranks 0 and 3 keep their quarter, 1 and 2 generate with the other half."""
    plan = opaque(800, (1, 4, 2), (1, 2), "vanilla")
    assert [rank.redundant_bytes for rank in plan.ranks] == [0, 200, 200, 0, 0, 200, 200, 0]
    assert [rank.kept_bytes for rank in plan.ranks] == [200, 0, 0, 200, 200, 0, 0, 200]
    assert plan.table == Overhead(volume=600, peak=800, redundant=200)


def test_deepspeed_chat_gathers_over_replicas_too() -> None:
    plan = opaque(1600, (1, 4, 2), (1, 2), "deepspeed-chat")
    assert {rank.received_bytes for rank in plan.ranks} == {1400}
    assert {rank.redundant_bytes for rank in plan.ranks} == {200}
    assert plan.table == Overhead(volume=1400, peak=1600, redundant=200)
    assert [receive.source for receive in plan.ranks[3].receives] == [0, 1, 2, 4, 5, 6, 7]
    assert {receive.group for receive in plan.ranks[3].receives} == {tuple(range(8))}


def test_nothing_comes_of_what_everybody_holds_or_nobody_has_a_piece_of() -> None:
    weights = Weights((Sharded("norm", (2,), 0),), ((0,),))
    plan = reshard(weights, layout_of((1, 2, 1), (1, 1), "hybridflow"))
    assert [rank.receives for rank in plan.ranks] == [(), ()]
    parts = [weights.flat_part(4, rank).get("norm") for rank in range(4)]
    assert parts == [None, [(0, 1)], None, [(1, 2)]]


def test_who_gives_what_to_whom() -> None:
    """The drawing at the head of the module."""
    rank = opaque(800, (1, 4, 2), (1, 2), "hybridflow").ranks[5]
    assert [(slice_.start, slice_.stop, slice_.size_bytes) for slice_ in rank.keeps] == [(2, 4, 200)]
    (receive,) = rank.receives
    assert (receive.source, receive.group, receive.size_bytes) == (4, (4, 5), 200)
    assert [(slice_.start, slice_.stop) for slice_ in receive.slices] == [(0, 2)]


def test_opaque_models_have_exact_shares() -> None:
    """Table 2 for all sizes; 1,000,003 bytes is a prime that nothing divides."""
    size = 1_000_003
    for (p, t), (pg, tg) in pairs():
        plan = opaque(size, (p, t, 1), (pg, tg), "hybridflow")
        assert {r.received_bytes for r in plan.ranks} == {Fraction(size * (t * p - tg * pg), tg * pg * t * p)}
        assert {r.peak_bytes for r in plan.ranks} == {Fraction(size, tg * pg)}
        assert plan.table == (plan.ranks[0].received_bytes, plan.ranks[0].peak_bytes, 0)
        assert {r.kept_bytes for r in plan.ranks} == {Fraction(size, t * p)}
        assert {r.redundant_bytes for r in plan.ranks} == {0}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def masks(request: pytest.FixtureRequest) -> Masks:
    return Masks(llama(tied=request.param))


def check_hybridflow(masks: Masks, plan: ReshardPlan, generation: Stages) -> None:
    """Kept and received make the generation shard, each number once, from ranks that train it."""
    layout = plan.layout
    trained = []
    for rank in range(layout.num_ranks):
        at = layout.coordinate(rank)
        trained.append(masks.shard(plan.weights.stages, at.p, t=layout.t, index=at.t))
    sent = [0] * layout.num_ranks
    looked_at = random.Random(0).sample(range(layout.num_ranks), min(layout.num_ranks, LOOKED_AT))  # noqa: S311
    for part in plan.ranks:
        gen = layout.generating.coordinate(part.rank)
        wanted = masks.shard(generation, gen.p, t=layout.generating.t, index=gen.t)
        assert part.received_bytes == 2 * (wanted.sum() - trained[part.rank].sum())
        assert part.peak_bytes == 2 * wanted.sum()
        assert (part.redundant_bytes, part.redundant) == (0, ())
        for receive in part.receives:
            sent[receive.source] += int(receive.size_bytes)
        if part.rank in looked_at:
            check_rank(masks, part, trained, wanted)
    assert [part.sent_bytes for part in plan.ranks] == sent


def check_rank(masks: Masks, part: RankPlan, trained: Sequence[Mask], wanted: Mask) -> None:
    counts = masks.counts(part.keeps)
    assert (counts == trained[part.rank]).all()  # it keeps all that it trains
    for receive in part.receives:
        more = masks.counts(receive.slices)
        assert not more[~trained[receive.source]].any()
        assert receive.size_bytes == 2 * more.sum()
        assert {part.rank, receive.source} <= set(receive.group)
        counts = counts + more
    assert (counts == wanted).all()


@pytest.mark.parametrize("masks", [True], ids=["tied"], indirect=True)
@pytest.mark.parametrize("train", list(product(SIZES[:-1], repeat=2)), ids=str)
def test_hybridflow_tiles_a_llama(masks: Masks, train: tuple[int, int]) -> None:
    for generate in (generate for sizes, generate in pairs() if sizes == train):
        layout = layout_of((*train, 1), generate, "hybridflow")
        plan = reshard(Weights(tuple(masks.params), even_stages(LAYERS, layout.p)), layout)
        check_hybridflow(masks, plan, even_stages(LAYERS, generate[0]))


@pytest.mark.parametrize(
    ("stages", "generate", "generation"),
    [
        (((0, 1, 2), (3,), (4, 5), (6, 7)), 2, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (((0,), (1, 2, 3, 4, 5, 6), (7,)), 1, (tuple(range(8)),)),
        (((0, 1, 4, 5), (2, 3, 6, 7)), 1, (tuple(range(8)),)),
        (((0, 1, 4, 5), (2, 3, 6, 7)), 2, ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
    ids=["uneven", "one in the middle", "interleaved to one", "interleaved as trained"],
)
@pytest.mark.parametrize("order", ["tpd", "tdp"])
def test_hybridflow_tiles_other_stages(
    masks: Masks, stages: Stages, generate: int, generation: Stages, order: Order
) -> None:
    layout = layout_of((len(stages), 2, 2), (generate, 1), "hybridflow", order=order)
    check_hybridflow(masks, reshard(Weights(tuple(masks.params), stages), layout), generation)


@pytest.mark.parametrize(
    ("train", "generate"), [((2, 4, 1), (1, 2)), ((2, 2, 2), (2, 1)), ((1, 8, 1), (1, 1))]
)
def test_the_others_gather_everything(
    masks: Masks, train: tuple[int, int, int], generate: tuple[int, int]
) -> None:
    layout = layout_of(train, generate, "vanilla")
    weights = Weights(tuple(masks.params), even_stages(LAYERS, layout.p))
    for planner in ("vanilla", "deepspeed-chat"):
        for part in reshard(weights, layout, planner=planner).ranks:
            at, gen = layout.coordinate(part.rank), layout.generating.coordinate(part.rank)
            trained = masks.flat(layout.num_ranks, part.rank)
            generated = np.zeros(masks.length, bool)
            if planner == "vanilla":
                trained = masks.shard(weights.stages, at.p, t=layout.t, index=at.t)
                stages = even_stages(LAYERS, layout.generating.p)
                generated = masks.shard(stages, gen.p, t=layout.generating.t, index=gen.t)
            counts = sum((masks.counts(r.slices) for r in part.receives), start=trained.astype(np.int64))
            assert (counts == 1).all()
            assert (masks.counts(part.keeps) == (trained & generated)).all()
            assert (masks.counts(part.redundant) == (trained & ~generated)).all()
            assert part.redundant_bytes == 2 * (trained & ~generated).sum()
            assert part.peak_bytes == 2 * masks.length


@pytest.mark.parametrize(
    "case",
    [
        Case((2, 4, 1), (1, 2), num_layers=5, tied=True),
        Case((4, 2, 1), (1, 1), num_layers=5, tied=True),
        Case((4, 4, 1), (2, 2), num_layers=8),
    ],
    ids=str,
)
def test_the_plan_is_what_the_buckets_send(case: Case) -> None:
    plan = reshard(Weights(tuple(case.params), case.stages, case.dtype.itemsize), case.layout)
    for part in plan.ranks:
        at = case.layout.generating.coordinate(part.rank)
        group = next(g for g in case.layout.generating.groups("micro") if part.rank in g)
        found: dict[int, int] = {}
        for bucket in buckets(case.params, case.stages, case.layout.generating, stage=at.p):
            for slot in bucket:
                piece = np.prod(slot.stored) * case.dtype.itemsize
                for _, sender, receiver in slot.routes:
                    if receiver == at.micro:
                        found[group[sender]] = found.get(group[sender], 0) + int(piece)
        assert {receive.source: receive.size_bytes for receive in part.receives} == found


def test_generation_stages_of_an_interleaved_pipeline_by_hand() -> None:
    stages = even_stages(9, 4, chunks=2)
    assert stages == ((0, 1, 5), (2, 6), (3, 7), (4, 8))
    assert generation_stages(stages, 2) == ((0, 1, 2, 5, 6), (3, 4, 7, 8))
    assert generation_stages(stages, 1) == (tuple(range(9)),)
    norms = tuple(Sharded(f"norm {i}", (4,), i) for i in range(9))
    for pg in (1, 2, 4):
        plan = reshard(Weights(norms, stages), layout_of((4, 1, 1), (pg, 1), "hybridflow"))
        held = max(len(stage) for stage in generation_stages(stages, pg))
        assert max(part.peak_bytes for part in plan.ranks) == held * plan.weights.size_bytes / 9


def test_what_cannot_be_planned_is_refused() -> None:
    norms = tuple(Sharded(f"norm {i}", (4,), i) for i in range(8))
    interleaved = even_stages(8, 4, chunks=2)
    with pytest.raises(ValueError, match=r"4 stages of layers for train p=2"):
        reshard(Weights(norms, interleaved), layout_of((2, 1, 1), (1, 1), "hybridflow"))
    with pytest.raises(ValueError, match=r"layer 7 is on 0 of the stages .* layers 0 to 7 once"):
        Weights(norms, even_stages(7, 2))
    with pytest.raises(ValueError, match=r"layer 3 is on 2 of the stages"):
        Weights(norms, ((0, 1, 2, 3), (3, 4, 5, 6, 7)))
    pair, eight = layout_of((1, 2, 1), (1, 1), "hybridflow"), layout_of((1, 8, 1), (1, 1), "hybridflow")
    with pytest.raises(ValueError, match=r"by the rule 'hybridflow'. Give Generation\(rule='vanilla'\)"):
        reshard(Weights.opaque(8, pair), pair, planner="vanilla")
    with pytest.raises(ValueError, match=r"qkv: 12 along dimension 0 is not divisible by t=8"):
        reshard(Weights((Sharded("qkv", (12, 4), 0, 0),), ((0,),)), eight)
