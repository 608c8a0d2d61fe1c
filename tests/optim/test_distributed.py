"""DistributedDataParallel and fully_shard on two gloo processes, against one process with the whole batch."""

import time

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, linear, normalize
from torch.nn.parallel import DistributedDataParallel

from gtracer import Clip, FiniteDifference, SGDTracer, TracerPenalty
from gtracer.curvature import micro_batch
from gtracer.experimental import PreviousStep
from gtracer.optim import processes
from support.data_parallel import BATCH, OPTIMIZERS, agree, alone, averages, batches, flat, half, network, trained
from support.gloo import end, together


class Directed(nn.Linear):
    """Sees only the direction of its rows."""

    def forward(self, x):
        return linear(x, normalize(self.weight), self.bias)


def directed_network():
    torch.manual_seed(0)
    return nn.Sequential(Directed(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


# DistributedDataParallel.


def ddp(rank, name, own, words, views=False):
    model = DistributedDataParallel(network(), gradient_as_bucket_view=views)
    return trained(model, OPTIMIZERS[name](model.parameters(), model=model, **own), half(rank), **words)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("views", [False, True])
def test_the_penalty_is_that_of_the_global_batch(name, views):
    """Also where gradients are views of buckets that the next pass fills anew."""
    agree(together(ddp, name, {}, {}, views), alone(name))


def ddp_in_bfloat16(rank, parts):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16())
    opt = OPTIMIZERS["SGDTracer"](model.parameters(), model=model)
    for x, y in batches():
        x, y = x[half(rank)].bfloat16(), y[half(rank)]
        given = {"batches": list(zip(x.split(parts), y.split(parts), strict=True))} if parts else {}
        opt.step(lambda x, y: cross_entropy(model(x).float(), y), *(() if parts else (x, y)), **given)
    return flat(model.parameters()).float()


@pytest.mark.parametrize("parts", [0, 2])
def test_weights_in_bfloat16(parts):
    """The same on both processes, and near those of one in float32."""
    first, second = together(ddp_in_bfloat16, parts)
    assert torch.equal(first, second)
    expected, _ = alone("SGDTracer")
    start = flat(network().parameters())
    assert (first - expected).norm() < 0.05 * (expected - start).norm()


def test_both_displaced_gradients_are_kept_apart_in_buckets():
    central = {"engine": FiniteDifference(central=True)}
    agree(together(ddp, "SGDTracer", central, {}, True), alone("SGDTracer", **central))


def with_another_optimiser(rank, words, parts, views=False):
    """The body's is ours; what the head's finds in `.grad` after a step."""
    model = DistributedDataParallel(network(), gradient_as_bucket_view=views)
    opt = OPTIMIZERS["SGDTracer"](model.module[0].parameters(), model=model)
    x, y = (batch[half(rank)] for batch in batches()[0])
    given = {"batches": list(zip(x.split(parts), y.split(parts), strict=True))} if parts else {}
    opt.step(lambda x, y: cross_entropy(model(x), y), *(() if parts else (x, y)), **given, **words)
    return [p.grad.clone() for p in model.module[-1].parameters()]


@pytest.mark.parametrize(
    ("words", "parts", "views"), [({}, 0, False), ({}, 0, True), ({}, 3, False), ({"penalty": "each"}, 0, False)]
)
def test_another_optimiser_finds_the_gradient_of_the_global_batch(words, parts, views):
    model, (x, y) = network(), batches()[0]
    expected = torch.autograd.grad(cross_entropy(model(x), y), list(model[-1].parameters()))
    for found in together(with_another_optimiser, words, parts, views):
        torch.testing.assert_close(found, list(expected))


def in_a_group_of_its_own(rank, words, parts):
    groups = [distributed.new_group([r]) for r in range(2)]
    model = DistributedDataParallel(network(), process_group=groups[rank])
    opt = OPTIMIZERS["SGDTracer"](model.parameters(), model=model)
    for x, y in batches():
        given = {"batches": list(zip(x.split(parts), y.split(parts), strict=True))} if parts else {}
        opt.step(lambda x, y: cross_entropy(model(x), y), *(() if parts else ((rank + 1) * x, y)), **given, **words)
    return flat(model.parameters()), flat(averages(opt))


@pytest.mark.parametrize(("words", "parts"), [({"penalty": "each"}, 0), ({}, 6)])
def test_other_groups_are_left_alone(words, parts):
    """A process with a group of its own trains as it does alone, while the other does something else."""
    found = together(in_a_group_of_its_own, words, parts)[0]
    agree([found], alone("SGDTracer"))


def with_statistics(rank, words, parts):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    model = DistributedDataParallel(net)
    opt = OPTIMIZERS["SGDTracer"](model.parameters(), model=model)
    for x, y in batches():
        x, y = x[half(rank)] + rank, y[half(rank)]
        given = {"batches": list(zip(x.split(parts), y.split(parts), strict=True))} if parts else {}
        opt.step(lambda x, y: cross_entropy(model(x), y), *(() if parts else (x, y)), **given, **words)
    return (net[1].running_mean,)


@pytest.mark.parametrize(("words", "parts"), [({"penalty": "each"}, 0), ({}, 3), ({"penalty": "each"}, 3)])
def test_statistics_are_the_first_process_s(words, parts):
    """As DistributedDataParallel keeps them, though the passes join no gradients."""
    found = together(with_statistics, words, parts)
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][0].any()


def with_an_infinite_loss(rank):
    model = DistributedDataParallel(network())
    opt = OPTIMIZERS["SGDTracer"](model.parameters(), model=model, nonfinite="skip")
    for i, (x, y) in enumerate(batches()):
        more = torch.inf if rank == 1 and i == 1 else 0.0
        opt.step(lambda x, y, more=more: cross_entropy(model(x), y) + more, x[half(rank)], y[half(rank)])
    return (flat(model.parameters()),)


def test_all_processes_skip_a_step_or_none():
    found = together(with_an_infinite_loss)
    assert torch.equal(found[0][0], found[1][0])


def refused_statically(rank):
    model = DistributedDataParallel(network(), static_graph=True)
    try:
        trained(model, OPTIMIZERS["SGDTracer"](model.parameters(), model=model), half(rank), penalty="each")
    except RuntimeError as error:
        return str(error)


def test_a_static_graph_cannot_be_taken_in_parts():
    assert all("static_graph=True" in message for message in together(refused_statically))


def rho_by_itself(rank, held):
    model = DistributedDataParallel(network())
    (x, _), *_ = batches()
    # To one of them alone there would be no gap.
    own = {"held_out": lambda: 1.2 + 2 * rank + 0 * model(x[half(rank)]).sum()} if held else {}
    opt = SGDTracer(model.parameters(), lr=0.1, momentum=0.9, model=model, steps_per_epoch=5, **own)
    rhos, generator = [], torch.Generator().manual_seed(4)
    for step in range(140):
        y = torch.randint(3, (len(x),), generator=generator)
        x = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        level = 0.0 if held else rank * 40 * 0.9 ** (step // 5)  # it drops after each epoch, in one of them alone
        opt.step(lambda x=x, y=y, c=level: cross_entropy(model(x[half(rank)]), y[half(rank)]) + c)
        rhos.append(opt.param_groups[0]["rho"])
    return rhos, flat(model.parameters())


@pytest.mark.parametrize("held", [False, True])
def test_all_processes_set_the_same_rho(held):
    """Though each has losses of its own."""
    (ours, weights), (theirs, others) = together(rho_by_itself, held)
    assert ours == theirs
    assert torch.equal(weights, others)
    assert ours[-1] > 1.3e-5


def test_clipping_is_by_the_global_norm():
    clip = {"clip": Clip(norm=0.05)}
    agree(together(ddp, "SGDTracer", clip, {}), alone("SGDTracer", **clip))


@pytest.mark.parametrize("name", ["SGDTracer", "AdamWTracer"])
def test_the_penalty_of_each_process(name):
    """Is that of micro-batches of the processes' size, which one process can make; f is the same on all."""
    expected = alone(name, curvature=micro_batch(BATCH // 2))
    agree(together(ddp, name, {}, {"penalty": "each"}), expected)


def test_sam_of_each_process():
    """m-sharpness: as one process makes of the two halves of its batch."""
    model = network()
    opt = OPTIMIZERS["SAM"](model.parameters())
    for x, y in batches():
        halves = list(zip(x.split(BATCH // 2), y.split(BATCH // 2), strict=True))
        opt.step(lambda x, y: cross_entropy(model(x), y), batches=halves, penalty="each")
    expected = flat(model.parameters()), torch.zeros(0)
    agree(together(ddp, "SAM", {}, {"penalty": "each"}), expected)
    assert not torch.allclose(expected[0], alone("SAM")[0], rtol=1e-4)


def counting(rank, words):
    """How many exchanges a step makes."""
    model = DistributedDataParallel(network())
    own = {"f0": 0.1}  # else the first step makes one more, for f₀
    model.register_comm_hook(None, allreduce_hook)  # what it does anyway, but where it can be counted
    opt = OPTIMIZERS["SGDTracer"](model.parameters(), model=model, **own)
    (x, y), original, calls = batches()[0], distributed.all_reduce, 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    distributed.all_reduce = counted
    try:
        opt.step(lambda x, y: cross_entropy(model(x), y), x[half(rank)], y[half(rank)], **words)
    finally:
        distributed.all_reduce = original
    return calls


def test_the_penalty_of_each_process_takes_one_exchange_fewer():
    assert together(counting, {}) == [2, 2]
    assert together(counting, {"penalty": "each"}) == [1, 1]


def accumulating(rank, penalty):
    model = DistributedDataParallel(network())
    opt = OPTIMIZERS["SGDTracer"](model.parameters(), model=model)
    for x, y in batches():
        mine = x[half(rank)], y[half(rank)]
        parts = list(zip(*(t.split(3) for t in mine), strict=True))
        opt.step(lambda x, y: cross_entropy(model(x), y), batches=parts, penalty=penalty)
    return flat(model.parameters()), flat(averages(opt))


@pytest.mark.parametrize(("penalty", "own"), [("whole", {}), ("each", {"curvature": micro_batch(3)})])
def test_accumulation_on_two_processes(penalty, own):
    agree(together(accumulating, penalty), alone("SGDTracer", **own))


def refused(rank):
    model = DistributedDataParallel(network())
    opt = OPTIMIZERS["SGDTracer"](model.parameters())
    x, y = batches()[0]
    with pytest.raises(RuntimeError, match="penalty = 'each' on 2 processes needs model="):
        opt.step(lambda x, y: cross_entropy(model(x), y), x, y, penalty="each")
    return True


def exactly(rank):
    model = DistributedDataParallel(network())
    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.02, delta=0.05, engine="exact", model=model)
    x, y = batches()[0]
    with pytest.raises(RuntimeError, match="penalty='each'"):
        opt.step(lambda x, y: cross_entropy(model(x), y), x, y)
    return trained(model, opt, half(rank), penalty="each")


def test_the_exact_engine_of_each_process():
    """What would pass by DistributedDataParallel is refused, or averaged by us."""
    model = network()
    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.02, delta=0.05, engine="exact", curvature=micro_batch(BATCH // 2))
    agree(together(exactly), trained(model, opt))


def test_each_process_needs_the_wrapped_model():
    assert together(refused) == [True, True]


def resumed(rank, name, folder):
    """Two steps, a checkpoint of the first process, and the rest in new objects that load it."""
    model = DistributedDataParallel(network())
    opt = OPTIMIZERS[name](model.parameters(), model=model)
    steps = [(x[half(rank)], y[half(rank)]) for x, y in batches()]
    for x, y in steps[:2]:
        opt.step(lambda x, y: cross_entropy(model(x), y), x, y)
    if rank == 0:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, folder / "checkpoint.pt")
    distributed.barrier()
    model = DistributedDataParallel(network())
    opt = OPTIMIZERS[name](model.parameters(), model=model)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    for x, y in steps[2:]:
        opt.step(lambda x, y: cross_entropy(model(x), y), x, y)
    return flat(model.parameters()), flat(averages(opt))


def test_resuming_on_two_processes(tmp_path):
    agree(together(resumed, "SGDTracer", tmp_path), alone("SGDTracer"))


def means_of_one(rank):
    p = nn.Parameter(torch.zeros(2))
    found, number = processes.mean({p: [torch.full_like(p, rank + 1.0)]}, [p], None, torch.tensor(4.0 * rank))
    nothing, _ = processes.mean({}, [p], None)
    return found[p], number, len(nothing)


def test_the_mean_of_a_single_parameter():
    for found, number, nothing in together(means_of_one):
        assert [x.tolist() for x in found] == [[1.5, 1.5]]
        assert (number.item(), nothing) == (2.0, 0)


# fully_shard.


def sharded_network(make=network):
    model = make()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def sharded(rank, name, own, make=network):
    model = sharded_network(make)
    opt = OPTIMIZERS[name](model.parameters(), **own)
    found = trained(model, opt, half(rank))
    kept = [value for state in opt.state.values() for key, value in state.items() if key != "step"]
    assert kept
    assert all(isinstance(value, DTensor) for value in kept)
    assert sum(value.to_local().numel() for value in kept) < sum(value.numel() for value in kept)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fully_shard(name):
    agree(together(sharded, name, {}), alone(name))


def test_fully_shard_with_clipping():
    clip = {"clip": Clip(norm=0.05)}
    agree(together(sharded, "SGDTracer", clip), alone("SGDTracer", **clip))


def test_fully_shard_with_directions():
    """Whole rows are on one process, but not all of them."""
    own = {"scale_free": True}
    expected = alone("SGDTracer", directed_network, **own)
    agree(together(sharded, "SGDTracer", own, directed_network), expected)
    assert not torch.allclose(expected[0], alone("SGDTracer", directed_network)[0], rtol=1e-3)


def small_llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=12, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def llama_trained(model, rows, rho):
    opt = SGDTracer(model.parameters(), lr=0.2, rho=rho, delta=0.05, model=model)
    draw = torch.Generator().manual_seed(1)
    for _ in range(4):
        words = torch.randint(40, (BATCH, 12), generator=draw)[rows]
        opt.step(lambda words=words: model(input_ids=words, labels=words).loss.float())
    return flat(model.parameters())


def sharded_llama(rank, rho):
    model, policy = small_llama(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    found = llama_trained(model, half(rank), rho)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return found


def test_fully_shard_of_a_language_model_with_mixed_precision():
    """As near to float32's steps as passes in bfloat16 are, which is nearer than steps without the penalty."""
    start = flat(small_llama().parameters())
    wide, plain = (llama_trained(small_llama(), slice(None), rho) - start for rho in (0.002, 0.0))
    found, other = (weights - start for weights in together(sharded_llama, 0.002))
    assert torch.equal(found, other)
    apart = (found - wide).norm()
    assert apart < 0.05 * wide.norm()
    assert apart < (plain - wide).norm() / 3


def told_of_shards(rank):
    """What a second derivative is told where all layers are sharded, or one of them."""
    told, (x, y) = [], batches()[0]
    for which in ((0, 2), (0,)):
        model = network()
        for i in which:
            fully_shard(model[i])
        penalty = TracerPenalty(model.parameters(), rho=0.1)
        opt = SGDTracer(model.parameters(), rho=0.1, engine="exact", model=model)
        with pytest.raises(RuntimeError) as of_penalty:
            penalty(cross_entropy(model(x), y))
        with pytest.raises(RuntimeError) as of_step:
            opt.step(lambda model=model: cross_entropy(model(x), y))
        told += [str(of_penalty.value), str(of_step.value)]
    return told


def test_fully_shard_is_no_model_to_differentiate_twice():
    """Its layers would be left untrained without a word where others are whole."""
    for told in together(told_of_shards):
        assert len(told) == 4
        assert all("sharded by fully_shard" in message and "engine='finite-difference'" in message for message in told)


def in_columns_and_rows(rank):
    """Tensor-parallel weights are the graph's own leaves; a layer like the first is of no use here, as an expert's."""
    model, unused = network(), network()[0]
    parallel = parallelize_module(
        nn.ModuleDict({"model": model, "unused": unused}),
        init_device_mesh("cpu", (2,)),
        {"model.0": ColwiseParallel(), "model.2": RowwiseParallel(), "unused": ColwiseParallel()},
    )
    loss = cross_entropy(model(batches()[0][0]), batches()[0][1])
    penalised = TracerPenalty(parallel.parameters(), rho=0.1)(loss)
    penalised.backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def test_a_tensor_parallel_model_is_differentiated_twice():
    x, y = batches()[0]
    model = network()
    TracerPenalty(model.parameters(), rho=0.1)(cross_entropy(model(x), y)).backward()
    for found in together(in_columns_and_rows):
        for g, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(g, p.grad)


def half_way(rank, name, folder, own):
    model = sharded_network()
    opt = OPTIMIZERS[name](model.parameters(), **own)
    for x, y in batches()[:2]:
        opt.step(lambda x, y: cross_entropy(model(x), y), x[half(rank)], y[half(rank)])
    weights, state = get_state_dict(model, opt)
    checkpoint.save({"model": weights, "opt": state}, checkpoint_id=folder)


def the_rest(rank, name, folder, world, own):
    model = sharded_network()
    opt = OPTIMIZERS[name](model.parameters(), **own)
    weights, state = get_state_dict(model, opt)
    held = {"model": weights, "opt": state}
    checkpoint.load(held, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=held["model"], optim_state_dict=held["opt"])
    each = BATCH // world
    rows = slice(rank * each, (rank + 1) * each)
    for x, y in batches()[2:]:
        opt.step(lambda x, y: cross_entropy(model(x), y), x[rows], y[rows])
    return flat(model.parameters()), flat(averages(opt))


@pytest.mark.parametrize("name", ["SGDTracer", "AdamWTracer"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_sharded_checkpoint_goes_on_on_any_number_of_processes(name, world, tmp_path):
    together(half_way, name, tmp_path / "checkpoint", {})
    agree(together(the_rest, name, tmp_path / "checkpoint", world, {}, world=world), alone(name))


@pytest.mark.parametrize(
    "own", [{"interval": 3, "reuse": 0.5}, {"reuse": PreviousStep()}, {"scale_free": True}], ids=str
)
def test_a_sharded_checkpoint_of_what_is_reused(own, tmp_path):
    together(half_way, "SGDTracer", tmp_path / "checkpoint", own)
    agree(together(the_rest, "SGDTracer", tmp_path / "checkpoint", 2, own), alone("SGDTracer", **own))


def half_without_gradients(rank):
    """One process has nothing but zeros in its shards."""
    model = sharded_network()
    opt = OPTIMIZERS["SGDTracer"](model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, float(rank))
    try:
        opt.step()
    except RuntimeError as error:
        return str(error)


def test_all_processes_refuse_a_step_without_passes():
    assert all("without the second pass" in message for message in together(half_without_gradients))


def test_a_sharded_update_is_not_compiled():
    with pytest.raises(AssertionError, match="implementation = 'compiled' is for whole tensors"):
        together(sharded, "SGDTracer", {"implementation": "compiled"})


# The harness itself.


def hanging(rank):
    if rank == 0:
        time.sleep(60)


def test_a_process_that_hangs_is_not_left_behind(children):
    end()
    together(half)  # they are there
    with pytest.raises(TimeoutError, match=r"only \[1\] of 2 processes"):
        together(hanging, seconds=10)
    assert not children()


def failing(rank):
    if rank == 1:
        raise ValueError("on purpose")
    time.sleep(60)


def test_a_failure_is_told_and_nobody_left_behind(children):
    end()
    with pytest.raises(AssertionError, match="on purpose"):
        together(failing)
    assert not children()


def test_the_penalty_of_each_process_in_buckets():
    expected = alone("SGDTracer", curvature=micro_batch(BATCH // 2))
    agree(together(ddp, "SGDTracer", {}, {"penalty": "each"}, True), expected)


def accumulating_in_buckets(rank, penalty, own):
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    opt = OPTIMIZERS["SGDTracer"](model.parameters(), model=model, **own)
    for x, y in batches():
        parts = list(zip(*(t[half(rank)].split(3) for t in (x, y)), strict=True))
        opt.step(lambda x, y: cross_entropy(model(x), y), batches=parts, penalty=penalty)
    return flat(model.parameters()), flat(averages(opt))


CENTRAL = {"engine": FiniteDifference(central=True)}


@pytest.mark.parametrize(
    ("penalty", "own", "same"),
    [("whole", {}, {}), ("whole", CENTRAL, CENTRAL), ("each", CENTRAL, {"curvature": micro_batch(3), **CENTRAL})],
    ids=["whole", "central", "each"],
)
def test_accumulation_in_buckets(penalty, own, same):
    agree(together(accumulating_in_buckets, penalty, own), alone("SGDTracer", **same))
