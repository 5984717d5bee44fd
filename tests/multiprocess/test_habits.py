"""What people's training loops do besides the three loops: accumulate, evaluate, load, clip, take other batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.training import (
    CLIP,
    SETUPS,
    Setup,
    different,
    different_maps,
    grads_of,
    loop_a,
    loop_c,
    make_optimizer,
    parallelize,
    state_of,
)
from tests.zoo import CASES, VOCABULARY, WIDTH, Batch, Block, Chain, Inside, TiedWords, mean_loss, vectors

LIMIT_S = 30.0
HYBRID = SETUPS["pp2xdp2"]
PIPELINE = SETUPS["pp2"]


def rows_of(count, seed=0):
    """Return a batch of ``count`` rows."""
    torch.manual_seed(seed)
    return vectors(0, count)


def check(found, expected):
    """Compare the gradients (and outputs) of all ranks with those of the plain model."""
    for rank, values in enumerate(found):
        assert list(different_maps(f"rank {rank}:", values, expected)) == []


# ---------------------------------------------------------------- accumulation


def accumulate(loop, model=None):
    """Three batches of unlike sizes before one step, then another step: the gradients before each."""
    case = CASES["chain"]
    if model is None:
        plain = Inside(case.build(), case.loss) if loop == "B" else case.build()
        model = parallelize(
            plain, case.example(), HYBRID, inside=loop == "B", loss_fn=None if loop == "B" else case.loss
        )
    optimizer = make_optimizer(model)
    found = {}
    for step in range(2):
        for part, count in enumerate((8, 3, 5)):
            batch = rows_of(count, seed=10 * step + part)
            if loop == "C":
                loop_c(model, batch, case.loss)
            else:
                value = (
                    model(*batch.args, target=batch.target)
                    if loop == "B"
                    else case.loss(model(*batch.args), batch.target)
                )
                (value / (part + 1)).backward()
        found |= {f"{step} {name}": grad for name, grad in grads_of(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("loop", ["A", "B"])
def test_gradients_accumulate_scaled(pool, loop):
    case = CASES["chain"]
    expected = accumulate(loop, Inside(case.build(), case.loss) if loop == "B" else case.build())
    check(pool.run(accumulate, HYBRID.ranks, loop, seconds=LIMIT_S), expected)


class Fused:
    """A plain model with a train_step."""

    def __init__(self, model, loss):
        self.model, self.loss = model, loss
        self.parameters, self.named_parameters = model.parameters, model.named_parameters

    def train_step(self, args, kwargs, target):
        value = self.loss(self.model(*args, **kwargs), target)
        value.backward()
        return value.detach()


def test_gradients_of_fused_steps_accumulate(pool):
    case = CASES["chain"]
    check(pool.run(accumulate, HYBRID.ranks, "C", seconds=LIMIT_S), accumulate("C", Fused(case.build(), case.loss)))


# ---------------------------------------------------------------- forwards and backwards


def several_forwards(model=None):
    """Two forwards before one backward, then two backwards in the other order; inputs that want gradients."""
    case = CASES["skips"]
    model = model or parallelize(case.build(), case.example(), HYBRID)
    first, second = rows_of(8, 1), rows_of(6, 2)
    found = {}
    a, b = model(*first.args), model(*second.args)
    (mean_loss(a, first.target) + 2 * mean_loss(b, second.target)).backward()
    found |= {f"together {n}": g for n, g in grads_of(model).items()}
    model.zero_grad()
    a, b = model(*first.args), model(*second.args)
    mean_loss(b, second.target).backward()
    mean_loss(a, first.target).backward()
    found |= {f"crossed {n}": g for n, g in grads_of(model).items()}
    model.zero_grad()
    x = first.args[0].clone().requires_grad_()
    mean_loss(model(x), first.target).backward()
    found |= {"input": x.grad} | {f"with input {n}": g for n, g in grads_of(model).items()}
    return found


def test_several_forwards_before_a_backward_and_gradients_of_inputs(pool):
    check(pool.run(several_forwards, HYBRID.ranks, seconds=LIMIT_S), several_forwards(CASES["skips"].build()))


def gradient_of_an_input(loop, model=None):
    """The gradient of an input with rows and of one without."""
    case = CASES["named"]
    if model is None:
        inner = case.build()
        model = parallelize(
            Inside(inner, case.loss) if loop == "B" else inner, case.example(), HYBRID, inside=loop == "B"
        )
    batch = case.step(0)
    (x,), shift = batch.args, batch.kwargs["shift"].clone().requires_grad_()
    x = x.clone().requires_grad_()
    given = Batch((x,), {**batch.kwargs, "shift": shift}, batch.target)
    if loop == "B":
        model(x, target=given.target, **given.kwargs).backward()
    else:
        loop_a(model, given, case.loss)
    return {"x": x.grad, "shift": shift.grad}


@pytest.mark.parametrize("loop", ["A", "B"])
def test_inputs_get_their_gradient(pool, loop):
    case = CASES["named"]
    plain = Inside(case.build(), case.loss) if loop == "B" else case.build()
    check(pool.run(gradient_of_an_input, HYBRID.ranks, loop, seconds=LIMIT_S), gradient_of_an_input(loop, plain))


def play(parallel=True):
    """Two models against each other: gradients go through one into the other."""
    case = CASES["chain"]
    torch.manual_seed(3)
    maker, judge = case.build(), Chain().double()
    if parallel:
        maker, judge = (parallelize(model, case.example(), PIPELINE) for model in (maker, judge))
    optimizers = [make_optimizer(model) for model in (maker, judge)]
    found = {}
    for step in range(2):
        (noise,), real = case.step(step).args, case.step(step).target
        for optimizer in optimizers:
            optimizer.zero_grad()
        (judge(real).mean() - judge(maker(noise).detach()).mean()).backward()
        optimizers[1].step()
        judge(maker(noise)).square().mean().backward()
        optimizers[0].step()
        for name, model in {"maker": maker, "judge": judge}.items():
            found |= {f"{step} {name} {n}": g for n, g in grads_of(model).items()}
    return found


def test_two_models_play_against_each_other(pool):
    check(pool.run(play, PIPELINE.ranks, seconds=LIMIT_S), play(parallel=False))


class LossAndMore(nn.Module):
    """Returns its loss in a dict, with other results."""

    def __init__(self):
        super().__init__()
        self.chain = Chain()

    def forward(self, x, target):
        y = self.chain(x)
        return {"loss": mean_loss(y, target), "y": y, "rows": x.shape[0]}


def loss_among_results(model=None):
    """The model's loss alone, with a term of the user's on another result, and such a term alone."""
    torch.manual_seed(7)
    plain = LossAndMore().double()
    model = model or parallelize(plain, Batch((*rows_of(8).args, rows_of(8).target)), HYBRID)
    found = {}
    terms = {"loss": (1, 0), "both": (0.5, 2), "other": (0, 1)}
    for number, (name, (a, b)) in enumerate(terms.items()):
        batch = rows_of(6, number)
        model.zero_grad()
        result = model(*batch.args, batch.target)
        (a * result["loss"] + b * result["y"].square().mean()).backward()
        found |= {f"{name} {n}": torch.as_tensor(v).detach() for n, v in result.items()}
        found |= {f"{name} {n}": g for n, g in grads_of(model).items()}
    return found


def test_results_beside_the_loss_come_whole_and_take_gradients(pool):
    torch.manual_seed(7)
    check(pool.run(loss_among_results, HYBRID.ranks, seconds=LIMIT_S), loss_among_results(LossAndMore().double()))


class NoisyLossAndMore(nn.Module):
    """Draws random numbers and keeps statistics on the way to its results."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)) for _ in range(4))

    def forward(self, x, target):
        for block in self.blocks:
            x = block(x)
        return {"loss": mean_loss(x, target), "y": x}


def term_beside_the_loss(apart):
    """The gradient of a loss with a term of the user's: at once, or as the sum of two backwards of equal calls."""
    torch.manual_seed(7)
    batch = rows_of(8)
    model = parallelize(NoisyLossAndMore().double(), Batch((*batch.args, batch.target)), PIPELINE)
    for part in (("loss", "y"),) if not apart else (("loss",), ("y",)):
        torch.manual_seed(11)
        result = model(*batch.args, batch.target)
        sum(result[name].square().mean() for name in part).backward()
    state = model.full_state_dict()
    return grads_of(model) | {"tracked": state["blocks.0.2.num_batches_tracked"]}


def test_a_term_beside_the_loss_sees_the_same_random_numbers_and_changes_no_buffer(pool):
    at_once = pool.run(term_beside_the_loss, PIPELINE.ranks, False, seconds=LIMIT_S)
    apart = pool.run(term_beside_the_loss, PIPELINE.ranks, True, seconds=LIMIT_S)
    assert [int(values.pop("tracked")) for values in at_once] == [1, 1]
    assert [int(values.pop("tracked")) for values in apart] == [2, 2]
    for found, expected in zip(at_once, apart, strict=True):
        assert list(different_maps("gradients:", found, expected)) == []


def part_of_the_outputs(model=None):
    """A loss of one output only, then of the other only."""
    case = CASES["structured"]
    model = model or parallelize(case.build(), case.example(), PIPELINE)
    found = {}
    for part, choose in {"value": lambda o: o.value, "first": lambda o: o.extras["first"]}.items():
        model.zero_grad()
        choose(model(*rows_of(6).args)).square().mean().backward()
        found |= {f"{part} {n}": g for n, g in grads_of(model).items()}
    return found


def test_a_loss_of_one_of_several_outputs(pool):
    expected = part_of_the_outputs(CASES["structured"].build())
    assert expected["first blocks.2.up.weight"] is None
    check(pool.run(part_of_the_outputs, PIPELINE.ranks, seconds=LIMIT_S), expected)


# ---------------------------------------------------------------- evaluation


class Noisy(nn.Module):
    """Blocks with dropout."""

    def __init__(self, p=0.5):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(p)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return functional.dropout(x, 0.25, self.training)


def evaluate(model=None):
    """Evaluate before the first step and between steps, with batches of other sizes, with and without no_grad."""
    torch.manual_seed(7)
    found = {}
    if model is None:
        model = parallelize(Noisy().double(), rows_of(8), HYBRID, loss_fn=mean_loss)
    for number, count in enumerate((3, 16, 1)):
        model.eval()
        with torch.no_grad():
            out = model(*rows_of(count, number).args)
        found |= {f"{number}": out, f"{number} flag": torch.tensor(out.requires_grad)}
        found[f"{number} with grad"] = model(*rows_of(count, number).args).detach()
        model.train()
        if hasattr(model, "train_step"):  # moves nothing: no optimizer
            loop_c(model, rows_of(8), mean_loss)
            model.zero_grad()
        (x,) = rows_of(8).args
        with torch.no_grad():
            assert not torch.equal(model(x), model(x)), "dropout is off in training"
    model.eval()
    loop_a(model, rows_of(5), mean_loss)
    return found | {f"eval {n}": g for n, g in grads_of(model).items()}


def test_evaluation_first_and_between(pool):
    torch.manual_seed(7)
    check(pool.run(evaluate, HYBRID.ranks, seconds=LIMIT_S), evaluate(Noisy().double()))


def sentences_of_many_lengths(model=None):
    """Every step has its own number of words and of rows."""
    case = CASES["tied_words"]
    if model is None:
        model = parallelize(case.build(), case.example(), HYBRID)
    found = {}
    for number, (count, length) in enumerate([(8, 5), (5, 2), (2, 4), (7, 1), (1, 3), (8, 5)]):
        torch.manual_seed(number)
        tokens, target = torch.randint(VOCABULARY, (2, count, length))
        loop_a(model, Batch((tokens,), {}, target), case.loss)
        found |= {f"{number} {n}": g for n, g in grads_of(model).items()}
    return found


def test_every_step_may_have_its_own_sizes(pool):
    expected = sentences_of_many_lengths(CASES["tied_words"].build())
    check(pool.run(sentences_of_many_lengths, HYBRID.ranks, seconds=LIMIT_S), expected)


def freeze_and_thaw(model=None):
    """Parameters stop and start learning between steps, up to whole stages."""
    case = CASES["chain"]
    model = model or parallelize(case.build(), case.example(), PIPELINE, loss_fn=case.loss)
    found = {}
    for number, frozen in enumerate([(), (3,), (0, 1), (0, 1, 2, 3), (2,)]):
        for at, block in enumerate(model.blocks):
            block.requires_grad_(at not in frozen)
        model.zero_grad()
        output = model(*case.step(number).args)
        found[f"{number} flag"] = torch.tensor(output.requires_grad)
        if output.requires_grad:
            case.loss(output, case.step(number).target).backward()
        found |= {f"{number} {n}": g for n, g in grads_of(model).items()}
        if hasattr(model, "train_step") and len(frozen) < 4:
            model.zero_grad()
            loop_c(model, case.step(number), case.loss)
            found |= {f"{number} {n}": g for n, g in grads_of(model).items()}
    return found


def test_parameters_freeze_and_thaw_between_steps(pool):
    check(pool.run(freeze_and_thaw, PIPELINE.ranks, seconds=LIMIT_S), freeze_and_thaw(CASES["chain"].build()))


# ---------------------------------------------------------------- losses


def counted(output, target):
    """A mean over the positive targets: as many as there are, not as there are rows."""
    return functional.cross_entropy(output, target, ignore_index=-100)


def summed(output, target):
    return ((output - functional.one_hot(target.clamp(0), WIDTH)) ** 2).sum()


def contrasting(output, target):
    """Every row against every other."""
    return functional.cross_entropy(output @ output.T, torch.arange(len(output))) + 0 * target.sum()


def root_of_mean(output, target):
    """A mean, but not linear from there."""
    return functional.mse_loss(output, functional.one_hot(target.clamp(0), WIDTH).double()).sqrt()


def centred(output, target):
    return ((output - output.mean(0)) ** 2 * (target[:, None] >= 0)).mean()


def in_parts(output, target):
    return {"counted": counted(output, target), "size": 0.1 * output.square().mean()}


def weighted(output, target):
    """The target has a part without rows; class weights are summed over the counted targets."""
    labels, weights = target
    return functional.cross_entropy(output, labels, weight=weights)


def branching(output, target):
    """Decides by a value."""
    return output.abs().mean() if output.mean() > 0 else output.square().sum()


LOSSES = (counted, summed, contrasting, root_of_mean, centred, in_parts, weighted, branching)


def total(loss):
    return sum(loss.values()) if isinstance(loss, dict) else loss


def labelled(count):
    torch.manual_seed(count)
    target = torch.randint(WIDTH, (count,))
    target[count // 2 :] = -100  # so that some microbatches and the last replica have next to nothing to count
    return Batch((torch.randn(count, WIDTH, dtype=torch.float64),), {}, target)


def lose(number, setup, model=None):
    """Gradients and losses of batches that do not divide: rows 8, 5, 3, 1."""
    loss = LOSSES[number]
    module = model or parallelize(CASES["chain"].build(), labelled(8), setup, loss_fn=loss)
    found = {}
    for count in (8, 5, 3, 1):
        batch = labelled(count)
        batch.target[0] = 2
        target = (
            (batch.target, torch.linspace(0.5, 2, WIDTH, dtype=torch.float64)) if loss is weighted else batch.target
        )
        batch = Batch(batch.args, {}, target)
        module.zero_grad()
        if model is None:
            found[f"{count} loss"] = loop_c(module, batch, loss)
        else:
            value = total(loss(module(*batch.args), batch.target))
            value.backward()
            found[f"{count} loss"] = value.detach()
        found |= {f"{count} {n}": g for n, g in grads_of(module).items()}
    return found


@pytest.mark.parametrize("number", range(len(LOSSES)), ids=[loss.__name__ for loss in LOSSES])
def test_the_loss_is_that_of_the_whole_batch(pool, number):
    check(pool.run(lose, HYBRID.ranks, number, HYBRID, seconds=LIMIT_S), lose(number, HYBRID, CASES["chain"].build()))


# ---------------------------------------------------------------- chance


class Masks(nn.Module):
    """Returns the masks of two layers' dropouts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x):
        first = self.layers[0](x)
        second = self.layers[1](first)
        return (first != 0).double() + 0 * x, (second != 0).double() + 0 * x


def draw_masks(seeds):
    """Return for each seed the masks of all rows and layers, and the global generator's next numbers."""
    torch.manual_seed(0)
    ones = torch.ones(16, WIDTH, dtype=torch.float64)
    module = parallelize(Masks().double(), Batch((ones,)), HYBRID, verify="off")
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        calls = [torch.stack(module(ones)) for _ in range(16)]
        found.append((torch.cat(calls, dim=2), torch.rand(4)))
    return found


def test_dropout_differs_over_everything_and_follows_the_seed(pool):
    ranks = pool.run(draw_masks, HYBRID.ranks, (1, 1, 2), seconds=LIMIT_S)
    (masks, after), (again, _), (other_seed, _) = ranks[0]
    for (other, other_after), *_ in ranks[1:]:
        assert torch.equal(masks, other), "the ranks see different results"
        assert torch.equal(after, other_after), "the global generators have drifted apart"
    rows = masks.flatten(0, 1)  # both layers' rows: 2 replicas x 2 microbatches x 4 rows each
    assert len(torch.unique(rows, dim=0)) == len(rows), "two rows, or two layers, have one mask"
    assert 0.4 < masks.mean() < 0.6
    assert torch.equal(masks, again)
    assert not torch.equal(masks, other_seed)


class Dropped(nn.Module):
    """Linear layers with dropout behind, whose gradients follow from the masks that the results show."""

    def __init__(self, *, again):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.drop = nn.Dropout(0.5)
        self.again = again

    def forward(self, x):
        outputs = []
        for layer in self.layers:
            run = lambda x, layer=layer: self.drop(layer(x))  # noqa: E731
            outputs.append(checkpoint(run, x, use_reentrant=False) if self.again else run(x))
        return outputs


def backward_through_masks(again):
    torch.manual_seed(0)
    plain = Dropped(again=again).double()
    (x,) = rows_of(8).args
    module = parallelize(plain, Batch((x,)), HYBRID)
    found = module(x)
    sum((number + 1) * out.sum() for number, out in enumerate(found)).backward()
    expected = {}
    for number, out in enumerate(found):
        mask = (out.detach() != 0).double() * 2
        expected[f"layers.{number}.weight"] = (number + 1) * mask.T @ x
    return module.full_grads(), expected


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_the_backward_sees_the_masks_of_the_forward(pool, again):
    for found, expected in pool.run(backward_through_masks, HYBRID.ranks, again, seconds=LIMIT_S):
        assert list(different_maps("gradient of", found, expected)) == []


# ---------------------------------------------------------------- state


def load_and_save():
    """State out, in, and out again; a model without weights takes the same state."""
    case = CASES["tied_words"]
    module = parallelize(case.build(), case.example(), HYBRID)
    first = state_of(module)
    changed = {name: value + 1 for name, value in first.items()}
    module.load_full_state_dict(changed)
    second = state_of(module)
    with torch.device("meta"):
        bare = TiedWords().double()
    empty = parallelize(bare, case.example(), HYBRID)
    try:
        empty(*case.step(0).args)
        refusal = ""
    except Exception as error:  # noqa: BLE001
        refusal = str(error)
    partial = {name: value for name, value in changed.items() if name != "head.weight"}  # its tie gives it
    empty.load_full_state_dict(partial)
    with torch.no_grad():
        outputs = empty(*case.step(0).args), module(*case.step(0).args)
    return first, second, state_of(empty), outputs, refusal, {n: tuple(p.shape) for n, p in module.named_parameters()}


def test_state_goes_out_and_in_and_fills_a_model_without_weights(pool):
    case = CASES["tied_words"]
    plain = case.build()
    names = {name: tuple(parameter.shape) for name, parameter in plain.named_parameters()}
    changed = {name: value + 1 for name, value in plain.state_dict().items()}
    for first, second, filled, outputs, refusal, found_names in pool.run(load_and_save, HYBRID.ranks, seconds=LIMIT_S):
        assert list(different_maps("first", first, plain.state_dict())) == []
        assert list(different_maps("second", second, changed)) == []
        assert list(different_maps("filled", filled, changed)) == []
        assert "these tensors have no values: blocks.0.down.bias" in refusal
        assert found_names == names
        fresh = case.build()
        fresh.load_state_dict(changed)
        for found in outputs:
            assert list(different("output", found, fresh(*case.step(0).args).detach())) == []


# ---------------------------------------------------------------- norms


def norms(model=None):
    case = CASES["tied_words"]
    if model is None:
        model = parallelize(case.build(), case.example(), HYBRID)
    found = {}
    for order in (1.0, 2.0, 3.0, float("inf")):
        model.zero_grad()
        loop_a(model, case.step(0), case.loss)
        found[f"{order}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=order)
        found |= {f"{order} {n}": g for n, g in grads_of(model).items()}
        model.zero_grad()
        loop_a(model, case.step(0), case.loss)
        clip = getattr(model, "clip_grad_norm_", None)
        found[f"own {order}"] = clip(0.01, order) if clip else found[f"{order}"]
        found[f"total {order}"] = (
            torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type=order)
            if clip is None
            else model.gradient_norm(order)
        )
    return found


def test_norms_of_every_order_are_those_of_the_whole_model(pool):
    expected = norms(CASES["tied_words"].build())
    for order in (1.0, 2.0, 3.0, float("inf")):  # clipped, so the norm afterwards is the limit
        expected[f"total {order}"] = torch.tensor(0.01, dtype=torch.float64)
    found = pool.run(norms, HYBRID.ranks, seconds=LIMIT_S)
    for values in found:
        for order in (1.0, 2.0, 3.0, float("inf")):
            assert values[f"total {order}"].item() == pytest.approx(0.01, rel=1e-3)
            values[f"total {order}"] = expected[f"total {order}"]
    check(found, expected)


def clip_one_of_two(own):
    """Clip a model that has all its gradients on the first rank, while another model lives."""
    case = CASES["chain"]
    other = parallelize(case.build(), case.example(), PIPELINE)
    plain = case.build()
    for block in plain.blocks[2:]:
        block.requires_grad_(False)
    module = parallelize(plain, case.example(), PIPELINE)
    for model in (module, plain):
        loop_a(model, case.step(0), case.loss)
    assert other.plan is not None
    clip = module.clip_grad_norm_ if own else lambda limit: torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
    try:
        return clip(0.1), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    except Exception as error:  # noqa: BLE001
        return str(error)


def test_clipping_one_of_two_models(pool):
    for found, expected in pool.run(clip_one_of_two, PIPELINE.ranks, True, seconds=10):
        assert found.item() == pytest.approx(expected.item())


def test_torchs_clipping_says_so_where_it_cannot_know_the_model(pool):
    ranks = pool.run(clip_one_of_two, PIPELINE.ranks, False, seconds=10)
    assert all(isinstance(answer, str) for answer in ranks), "a norm of one rank alone"
    assert any("call clip_grad_norm_ of the parallel model" in answer for answer in ranks)


# ---------------------------------------------------------------- calls unlike the example


class Rearranging(nn.Module):
    """Puts its rows where the sizes do not show it, in the way it is asked to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, how="not"):
        y = self.linear(x)
        if how == "twice":
            return torch.cat([y, x])
        if how == "inside":
            return y[:, None].repeat(1, 3, 1).transpose(0, 1).flatten(0, 1)
        if how == "attention":
            return functional.scaled_dot_product_attention(x[None], y[None], x[None])[0]
        if how == "numbered":
            return y + torch.arange(x.shape[0])[:, None]
        return y


ARRANGEMENTS = ("not", "twice", "inside", "attention", "numbered")


def rearrange(example, weights):
    """Call a module in all ways, first with rows that are alike; a model without weights is filled first."""
    torch.manual_seed(0)
    plain = Rearranging().double()
    model = plain
    if not weights:
        with torch.device("meta"):
            model = Rearranging().double()
    module = parallelize(
        model, Batch(rows_of(8).args, {"how": example}), Setup(pp=1, dp=2 if not weights else 1, microbatches=2)
    )
    module.load_full_state_dict(plain.state_dict())
    found, expected = {}, {}
    for how in ARRANGEMENTS if weights else (example,):
        for number, (x,) in enumerate([(torch.ones(8, WIDTH).double(),), rows_of(8, 1).args, rows_of(5, 2).args]):
            for values, called in ((found, module), (expected, plain)):
                called.zero_grad()
                result = called(x, how=how)
                result.square().mean().backward()
                values[f"{how} {number}"] = result.detach()
                values |= {f"{how} {number} {name}": grad for name, grad in grads_of(called).items()}
    return found, expected


def test_calls_unlike_the_example_are_exact(pool):
    for found, expected in pool.run(rearrange, 1, "not", True, seconds=LIMIT_S):
        assert list(different_maps("result", found, expected)) == []


@pytest.mark.parametrize("how", ARRANGEMENTS)
def test_rows_of_a_model_without_weights_are_tried_once_it_has_some(pool, how):
    for found, expected in pool.run(rearrange, 2, how, False, seconds=LIMIT_S):
        assert list(different_maps("result", found, expected)) == []


def more_ranks_than_the_plan_uses():
    case = CASES["tied_words"]
    module = parallelize(case.build(), case.example(), PIPELINE, loss_fn=case.loss)
    value = loop_c(module, case.step(0), case.loss)
    return grads_of(module) | {"loss": value, "norm": module.clip_grad_norm_(CLIP)}


def test_an_idle_rank_has_the_same_results(pool):
    case = CASES["tied_words"]
    plain = case.build()
    value = loop_a(plain, case.step(0), case.loss)
    expected = grads_of(plain) | {"loss": value, "norm": torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)}
    check(pool.run(more_ranks_than_the_plan_uses, 3, seconds=LIMIT_S), expected)


# ---------------------------------------------------------------- values that decide the path


class Sceptic(nn.Module):
    """Looks at its input before it decides what to do with it."""

    def __init__(self):
        super().__init__()
        self.chain = Chain()

    def forward(self, x, keep):
        if keep.min() < 0:
            raise ValueError("keep must not be negative")
        y = self.chain(x)
        return y if torch.all(keep == 1) else y * keep.unsqueeze(-1)


def two_paths(model=None):
    """Batches that take one path and the other, of other sizes than the example's."""
    torch.manual_seed(5)
    plain = Sceptic().double()
    batch = rows_of(8)
    model = model or parallelize(plain, Batch((*batch.args, torch.ones(8).double())), HYBRID)
    found = {"stages": torch.tensor(len(model.plan.stages) if hasattr(model, "plan") else HYBRID.pp)}
    for number, (count, dropped) in enumerate([(8, 0), (6, 2), (5, 0), (8, 3), (2, 1)]):
        given = rows_of(count, number)
        keep = torch.ones(count).double()
        keep[:dropped] = 0.5
        loop_a(model, Batch((*given.args, keep), {}, given.target), mean_loss)
        found |= {f"{number} {n}": g for n, g in grads_of(model).items()}
    return found


def test_a_forward_that_branches_on_its_inputs_values_is_cut_and_exact(pool):
    torch.manual_seed(5)
    check(pool.run(two_paths, HYBRID.ranks, seconds=LIMIT_S), two_paths(Sceptic().double()))


# ---------------------------------------------------------------- what a model does only while it is traced


class Windowed(nn.Module):
    """Masks what lies before a window, where a sequence is longer; a trace masks always."""

    window = 4

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mixing() for _ in range(4)])

    def forward(self, x):
        mask = None
        if torch.compiler.is_exporting() or x.shape[1] > self.window:
            positions = torch.arange(x.shape[1])
            mask = (positions[:, None] - positions[None, :]).abs() < self.window
        for block in self.blocks:
            x = block(x, mask)
        return x


class Mixing(nn.Module):
    """Adds a mean over the sequence."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        mixed = self.linear(x)
        return x + (mixed.mean(1, keepdim=True) if mask is None else mask.to(x.dtype) @ mixed / mask.shape[0])


def sentences(length):
    torch.manual_seed(length)
    x, target = torch.randn(2, 8, length, WIDTH, dtype=torch.float64)
    return Batch((x,), {}, target)


def lengthening(model=None):
    """Sequences within the window, then longer ones, then short ones again."""
    if model is None:
        torch.manual_seed(0)
        model = parallelize(Windowed().double(), sentences(3), PIPELINE, loss_fn=mean_loss)
    found = {}
    for length in (3, 7, 2):
        loop_a(model, sentences(length), mean_loss)
        found |= {f"{length} {name}": grad for name, grad in grads_of(model).items()}
        model.zero_grad()
    return found


def test_a_mask_comes_with_the_sequences_that_need_it(pool):
    torch.manual_seed(0)
    check(pool.run(lengthening, PIPELINE.ranks, seconds=LIMIT_S), lengthening(Windowed().double()))
