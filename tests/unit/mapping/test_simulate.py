"""The simulators: what each effect does, against hand-computed numbers."""

import dataclasses
import math
from functools import partial
from itertools import pairwise, product

import pytest

from rlhf_lightning.mapping import network, shapes, simulate
from rlhf_lightning.mapping.fit import Observation, fit, mean_square
from rlhf_lightning.mapping.generate import Replica, Span
from rlhf_lightning.mapping.hardware import A100, H100, Efficiency, Hardware, Overhead
from rlhf_lightning.mapping.layers import Setting
from rlhf_lightning.mapping.workload import Workload
from rlhf_lightning.parallel.layout import Generation, ParallelLayout

pytestmark = pytest.mark.unit

ONES = Efficiency(**{field.name: 1.0 for field in dataclasses.fields(Efficiency)})
PLAIN = dataclasses.replace(A100, efficiency=ONES, overhead=Overhead(), intra_latency=0.0, inter_latency=0.0)
"""An A100 without losses, on which numbers can be computed by hand."""
LLAMA = shapes.load("llama-7b")


LAYERS_KEEP = 32 * 2 * (9 * 4096 + 4 * 11008)
"""Bytes of the activations of its layers for a token: 9 h and 4 of the wide layer, in two bytes."""


def test_a_forward_pass_is_two_flop_a_parameter_and_token() -> None:
    """Kaplan 2020: matrix products 2 N, and causal attention 2 layers hidden length."""
    work = Workload(batch=8)
    estimate = simulate.infer(PLAIN, LLAMA, ParallelLayout(), work)
    tokens = 8 * 2048
    matrices = LLAMA.num_parameters - LLAMA.vocab * LLAMA.hidden - LLAMA.hidden * 65
    flop = tokens * (2 * matrices + 2 * LLAMA.layers * LLAMA.hidden * 2048)
    assert estimate.parts["compute"] == pytest.approx(flop / 312e12)
    assert sum(estimate.parts.values()) == pytest.approx(estimate.seconds)
    assert estimate.bound == "compute"
    whole = simulate.infer(PLAIN, LLAMA, ParallelLayout(), dataclasses.replace(work, fused_attention=False))
    flop = tokens * (2 * matrices + 4 * LLAMA.layers * LLAMA.hidden * 2048)  # no half of the scores left out
    assert whole.parts["compute"] == pytest.approx(flop / 312e12)
    # Each layer's activations are written and read, and three passes go over float32 logits.
    assert estimate.parts["memory bandwidth"] == pytest.approx(
        tokens * (2 * LAYERS_KEEP + 3 * 4 * 32000) / 2.039e12
    )


def test_recomputation_costs_a_third_of_the_matrix_products() -> None:
    work = Workload(batch=8, mini_batches=1)
    again = simulate.train(PLAIN, LLAMA, ParallelLayout(), work).parts["compute"]
    once = simulate.train(PLAIN, LLAMA, ParallelLayout(), dataclasses.replace(work, recompute=False))
    assert again / once.parts["compute"] == pytest.approx(4 / 3, rel=0.03)


def test_a_backward_pass_is_two_forward_passes_and_its_attention_two_and_a_half() -> None:
    work = Workload(batch=8, mini_batches=1, recompute=False, sharding="none")
    parts = simulate.train(PLAIN, LLAMA, ParallelLayout(), work).parts
    matrices = LLAMA.num_parameters - LLAMA.vocab * LLAMA.hidden - LLAMA.hidden * 65
    flop = 3 * 2 * matrices + 3.5 * 2 * 32 * 4096 * 2048
    assert parts["compute"] == pytest.approx(8 * 2048 * flop / 312e12)
    # The optimizer reads gradient, master and moments of 4 bytes, and writes all but the gradient.
    traffic = 8 * 2048 * (3 * 2 * LAYERS_KEEP + 2 * 3 * 4 * 32000) + (16 + 12) * LLAMA.num_parameters
    assert parts["memory bandwidth"] == pytest.approx(traffic / 2.039e12)


def test_stages_send_activations_on_and_gradients_back() -> None:
    work = Workload(batch=8, mini_batches=1, micro_batch_tokens=4096)
    sent = 8 * 2048 * 4096 * 2
    parts = simulate.infer(PLAIN, LLAMA, ParallelLayout(p=2), work).parts
    assert parts["intra-node network"] == pytest.approx(sent / 300e9)
    bubble = parts["pipeline bubble"]
    assert bubble == pytest.approx((sum(parts.values()) - bubble) / 4)  # of four micro-batches
    both = simulate.train(PLAIN, LLAMA, ParallelLayout(p=2), work).parts
    assert both["intra-node network"] == pytest.approx(2 * sent / 300e9)
    # Two shards of a stage send a half each, and share what leaves the node.
    across = simulate.infer(PLAIN, LLAMA, ParallelLayout(p=8, t=2), work).parts
    assert across["inter-node network"] == pytest.approx(sent / 2 / (25e9 / 2))


def test_few_micro_batches_leave_a_pipeline_empty() -> None:
    """Narayanan 2021, section 2.2.1: the bubble is (p - 1) / m of the computation."""
    work = Workload(batch=64, mini_batches=8, micro_batch_tokens=2048, sharding="none")
    layout = ParallelLayout(p=8)
    parts = simulate.train(PLAIN, LLAMA, layout, work).parts
    busy = parts["compute"] + parts["memory bandwidth"] + parts["intra-node network"]
    assert parts["pipeline bubble"] == pytest.approx(7 / 8 * busy, rel=0.06)
    assert parts["pipeline bubble"] > 0.7 * busy


@pytest.mark.parametrize(("sharding", "bytes_each"), [("none", 2 * 4), ("states", 4 + 2)])
def test_replicas_share_the_network_of_a_node(sharding: str, bytes_each: int) -> None:
    """Eight rings of 16 ranks leave each node, whose 25 GB/s they share."""
    work = Workload(mini_batches=8, sharding=sharding)  # type: ignore[arg-type]
    parts = simulate.train(PLAIN, LLAMA, ParallelLayout(t=8, d=16), work).parts
    traffic = bytes_each * LLAMA.num_parameters / 8 * 15 / 16
    assert parts["inter-node network"] == pytest.approx(8 * traffic / (25e9 / 8))


def test_shared_gradients_are_reduced_after_every_micro_batch() -> None:
    work = Workload(batch=64, mini_batches=8, sharding="gradients", micro_batch_tokens=2048)
    parts = simulate.train(PLAIN, LLAMA, ParallelLayout(d=4), work).parts
    assert parts["intra-node network"] == pytest.approx(
        8 * (2 * 4 + 2) * LLAMA.num_parameters * 3 / 4 / 300e9
    )


@pytest.mark.parametrize("recompute", [True, False])
def test_full_sharding_gathers_for_both_passes_of_every_micro_batch(*, recompute: bool) -> None:
    work = Workload(batch=64, mini_batches=8, sharding="full", micro_batch_tokens=2048, recompute=recompute)
    parts = simulate.train(PLAIN, LLAMA, ParallelLayout(d=4), work).parts
    traffic = (2 * 2 + 4) * LLAMA.num_parameters * 3 / 4
    assert parts["intra-node network"] == pytest.approx(8 * 2 * traffic / 300e9)
    for how, gathers in (("full", 16), ("states", 0)):
        scoring = dataclasses.replace(work, sharding=how)  # type: ignore[arg-type]
        scored = simulate.infer(PLAIN, LLAMA, ParallelLayout(d=4), scoring).parts
        assert scored["intra-node network"] == pytest.approx(
            gathers * 2 * LLAMA.num_parameters * 3 / 4 / 300e9
        )


def test_tensor_shards_reduce_four_times_a_layer_and_twice_more_to_recompute() -> None:
    """Shoeybi 2019, section 3."""
    work = Workload(batch=8, mini_batches=1, sharding="none")
    parts = simulate.train(PLAIN, LLAMA, ParallelLayout(t=8), work).parts
    message = 8 * 2048 * 4096 * 2
    assert parts["intra-node network"] == pytest.approx(32 * 6 * 2 * 7 / 8 * message / 300e9)


def test_a_group_within_a_node_does_not_use_the_network_between() -> None:
    assert not network.shard_group(A100, ParallelLayout(t=2, d=4), 4).crosses
    assert network.shard_group(A100, ParallelLayout(t=2, d=8), 8) == network.Group(8, True, 2)
    assert network.stage_group(A100, ParallelLayout(p=2, t=8)).crosses
    assert not network.stage_group(A100, ParallelLayout(p=2, t=4, d=2)).crosses
    for tg, size in ((8, 2), (4, 4)):  # of two stages, each in a node of its own
        layout = ParallelLayout(p=2, t=8, generation=Generation(1, tg))
        assert network.reshard_group(A100, layout) == network.Group(size, True, tg)


@pytest.mark.parametrize(("crosses", "hop"), [(False, 4e-6), (True, 1.5e-5)])
def test_hops_take_time_however_little_is_sent(*, crosses: bool, hop: float) -> None:
    assert network.send(A100, network.Group(2, crosses), 0.0) == hop
    assert network.all_gather(A100, network.Group(8, crosses), 0.0) == pytest.approx(3 * hop)


def _generate(work: Workload, *, kv_bytes: float = 1e15, tg: int = 1, hardware: Hardware = PLAIN) -> float:
    layout = ParallelLayout(t=tg)
    return simulate.generate(hardware, LLAMA, layout, work, kv_bytes=kv_bytes).seconds


def test_decoding_reads_weights_and_context_for_every_token() -> None:
    work = Workload(prompt=256, real_prompt=256, response=1024, batch=8, mini_batches=1)
    matrices = LLAMA.num_parameters - LLAMA.vocab * LLAMA.hidden - LLAMA.hidden * 65
    reads = 2 * matrices + 8 * (256 + 512) * LLAMA.kv_bytes()
    prefill = 8 * 256 * (2 * (matrices - LLAMA.head_parameters) + 2 * 32 * 4096 * 256) / 312e12
    assert _generate(work) == pytest.approx(1024 * reads / 2.039e12 + prefill, rel=0.001)


def test_stages_of_generation_decode_in_turn() -> None:
    """Each of two stages has a half of the layers, of the keys and of the sequences in flight."""
    work = Workload(prompt=256, real_prompt=256, response=1024, batch=8, mini_batches=1)
    shares = dataclasses.replace(ONES, prefill_matmul=0.5, attention=0.25, weights=0.8, kv=0.4, intra=0.2)
    lossy = dataclasses.replace(PLAIN, efficiency=shares)
    found = simulate.generate(lossy, LLAMA, ParallelLayout(p=2, t=2), work, kv_bytes=1e15)
    layers = 16 * LLAMA.layer_matrix_parameters
    weights = 2 * 2 * (layers + LLAMA.head_parameters) / 2
    reads = weights / 0.8 + 8 * (256 + 512) * LLAMA.kv_bytes() / 4 / 0.4
    assert found.parts["memory bandwidth"] == pytest.approx(1024 * reads / 2.039e12)
    prefill = 8 * 256 * (2 * layers / 0.5 + 2 * 16 * 4096 * 256 / 0.25) / 2 / 312e12
    bubble = 1 + 1 / 8
    assert found.parts["compute"] == pytest.approx(bubble * prefill)
    # Two shards all-reduce 2 x 1 / 2 of a message twice a layer: prompts, and in each step 4 sequences twice.
    messages = 2 * 16 * 4096 * 2 * (bubble * 8 * 256 + 1024 * 2 * 4)
    assert found.parts["intra-node network"] == pytest.approx(messages / 0.2 / 300e9)


def _steps(work: Workload, *, kv_bytes: float = 1e15) -> float:
    """Decoding steps and prefills, by what a second of overhead in each adds."""
    costly = dataclasses.replace(PLAIN, overhead=Overhead(decode_step=1.0))
    return _generate(work, kv_bytes=kv_bytes, hardware=costly) - _generate(work, kv_bytes=kv_bytes)


def test_too_little_room_makes_waves_and_none_is_refused() -> None:
    work = Workload(batch=64, mini_batches=1, max_resident=64)
    row = LLAMA.kv_bytes() * (256 + 1024)
    assert [_steps(work, kv_bytes=row * n) for n in (64, 32, 16)] == pytest.approx([1025, 2050, 4100])
    assert math.isinf(_generate(work, kv_bytes=0.9 * row))


def test_the_engines_limit_makes_waves_too() -> None:
    work = Workload(batch=512, mini_batches=1, max_resident=256)
    assert _steps(work) == pytest.approx(2 * 1025)
    assert _steps(dataclasses.replace(work, max_resident=0)) == pytest.approx(1025)


def test_short_responses_make_room_for_waiting_ones() -> None:
    """Half of 64 responses have 256 tokens: more steps than all tokens over 32 slots, at most two waves."""
    work = Workload(batch=64, mini_batches=1, max_resident=32, lengths=(256, 1024))
    assert 64 * 640 / 32 < _steps(work) < 2 * 1029
    assert _steps(dataclasses.replace(work, lengths=(640,))) == pytest.approx(2 * 641)


@pytest.mark.parametrize("lengths", [(), (1024,), (256, 1024), (64, 512, 512, 1024)])
def test_as_many_tokens_are_decoded_as_the_responses_have(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    spans = list[Span]()
    decode = Replica.decode

    def noted(replica: Replica, parts: dict[str, float], span: Span) -> None:
        spans.append(span)
        decode(replica, parts, span)

    monkeypatch.setattr(Replica, "decode", noted)
    work = Workload(batch=64, mini_batches=1, max_resident=24, lengths=lengths)
    _generate(work)
    tokens = sum(work.response_lengths) / len(work.response_lengths)
    assert sum(span.steps * span.sequences for span in spans) == pytest.approx(64 * tokens)
    # Each token reads all tokens before it.
    read = [length * 256 + length**2 / 2 for length in work.response_lengths]
    assert sum(span.steps * span.context for span in spans) == pytest.approx(64 * sum(read) / len(read))
    assert sum(span.started for span in spans) == pytest.approx(64)
    assert max(span.sequences for span in spans) <= 24


def test_the_overhead_of_a_step_is_the_same_on_any_number_of_devices() -> None:
    costly = dataclasses.replace(PLAIN, overhead=Overhead(decode_layer=1e-3))
    work = Workload(batch=8, mini_batches=1)
    for tg in (1, 8):
        extra = _generate(work, tg=tg, hardware=costly) - _generate(work, tg=tg)
        assert extra == pytest.approx((1024 + 1) * 32e-3)


def test_a_transition_moves_what_table_2_says() -> None:
    """HybridFlow Table 2: (tp - tg pg) / (tg pg t p) of the weights to each device."""
    for pg, tg in ((1, 8), (1, 4), (1, 2), (1, 1)):
        layout = ParallelLayout(1, 8, 2, generation=Generation(pg, tg))
        estimate = simulate.transition(PLAIN, LLAMA, layout, Workload())
        share = (8 - tg * pg) / (tg * pg * 8)
        assert estimate.seconds == pytest.approx(share * 2 * LLAMA.num_parameters / 300e9)
    costly = dataclasses.replace(PLAIN, overhead=Overhead(transition=1.0))
    parts = simulate.transition(costly, LLAMA, layout, Workload(sharding="full")).parts
    assert parts["overhead"] == 1.0
    # Its shard of training, half of which the other node has, comes first: eight rings share 25 GB/s.
    assert parts["inter-node network"] == pytest.approx(LLAMA.num_parameters * 2 / 8 / 2 / (25e9 / 8))


def test_more_replicas_speed_up_less_and_less() -> None:
    """The traffic of gradients does not shrink with d: 8 times the devices are not 8 times as fast."""
    layouts = [ParallelLayout(t=8, d=d) for d in (2, 4, 8, 16)]
    seconds = [simulate.train(A100, LLAMA, layout, Workload()).seconds for layout in layouts]
    gains = [a / b for a, b in pairwise(seconds)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5
    assert gains[-1] < 1.35


def test_a_fit_predicts_what_it_has_not_seen() -> None:
    truth = dataclasses.replace(PLAIN, efficiency=dataclasses.replace(ONES, matmul=0.4, memory=0.6))

    def seconds(hardware: Hardware, t: int) -> float:
        return simulate.train(hardware, LLAMA, ParallelLayout(t=t), Workload()).seconds

    seen = [Observation(f"t={t}", seconds(truth, t), partial(seconds, t=t)) for t in (1, 8)]
    free = [("efficiency", "matmul"), ("efficiency", "memory")]
    found = fit(PLAIN, mean_square(seen), free, tie=0.0)
    assert seconds(found, 2) == pytest.approx(seconds(truth, 2), rel=0.01)
    assert seconds(PLAIN, 2) < 0.6 * seconds(truth, 2)
    assert found.efficiency.matmul == pytest.approx(0.4, rel=0.05)


@pytest.mark.parametrize("t", [1, 2, 4, 6, 8, 16])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_a_transition_crosses_nodes_where_one_of_its_groups_does(p: int, t: int) -> None:
    for pg, tg in product(divisors(p), divisors(t)):
        layout = ParallelLayout(p, t, 1, generation=Generation(pg, tg))
        groups = layout.generating.groups("micro")
        crosses = any(len({rank // A100.gpus_per_node for rank in group}) > 1 for group in groups)
        assert network.reshard_group(A100, layout).crosses == crosses, (pg, tg)


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def test_copies_of_what_some_ranks_share_out_add_their_gradients() -> None:
    """By hand: s ranks of a node scatter and gather, and d / s copies, each with N / s, all-reduce."""
    full = Workload(batch=16, sharding="full", reshards=False, defers=True)
    copies = dataclasses.replace(full, shared_by=4)
    layout = ParallelLayout(d=16)
    at = [Setting(PLAIN, LLAMA, layout, work) for work in (full, copies)]
    count = LLAMA.num_parameters
    inside = (4 + 3 * 2) * count * 3 / 4 / PLAIN.intra_bandwidth
    across = 2 * (4 * count / 4) * 3 / 4 / (PLAIN.inter_bandwidth / 4)
    assert simulate._gradients(at[1], 3) == pytest.approx(inside + across)
    alone = (4 + 3 * 2) * count * 15 / 16 / PLAIN.inter_bandwidth
    assert simulate._gradients(at[0], 3) == pytest.approx(alone)
    assert simulate._optimizer(at[1]) == pytest.approx(4 * simulate._optimizer(at[0]))


def test_updates_and_scores_of_an_h100_are_near_what_one_took() -> None:
    """`python -m benchmarks.gpu`, 2026-11-26, compiled layers: docs/simulators.md has the table."""
    shape = shapes.ModelShape(
        name="1b", layers=22, hidden=2048, intermediate=5632, heads=32, kv_heads=4, vocab=32000
    )
    workload = Workload(
        prompt=256, response=256, batch=128, mini_batches=1, real_prompt=256, packed=True,
        micro_batch_tokens=16384, recompute=False, sharding="none",
    )  # fmt: skip
    found = [
        work(H100, shape, ParallelLayout(), workload).seconds for work in (simulate.train, simulate.infer)
    ]
    assert found == pytest.approx([0.887, 0.283], rel=0.1)
