"""Prices against hand-computed numbers, against torch's flop counter and against what autograd really keeps."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from partita.cost.analytic import AnalyticModel
from partita.cost.catalogue import CPU
from partita.cost.formulas import FORMULAS, packet_name, price_op
from partita.ir.graph import ITEM_SIZE
from tests.unit.cost.exported import export_graph, real_saved_bytes
from tests.unit.cost.tensors import price, tensor, weight

# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("aten.add_.Tensor", ("aten", "add")),
        ("torch.ops.aten.linear.default", ("aten", "linear")),
        ("aten._to_copy.default", ("aten", "_to_copy")),
        ("aten.__and__.Tensor", ("aten", "__and__")),
        ("<built-in function getitem>", ("", "getitem")),
        ("higher_order.wrap_with_set_grad_enabled", ("higher_order", "wrap_with_set_grad_enabled")),
        ("", ("", "")),
    ],
)
def test_a_target_is_split_into_namespace_and_name(target, expected):
    assert packet_name(target) == expected


@pytest.mark.parametrize("target", ["mylib.thing.default", "aten.no_such_operator.default", "torchvision.nms.default"])
def test_an_operator_without_formula_is_unknown_and_counts_traffic_only(target):
    x, y = tensor("x", 4, 8), tensor("y", 4, 8)
    cost = price_op(target, (x,), (y,))
    assert (cost.kind, cost.flops, cost.bytes, cost.saved) == ("unknown", 0, x.bytes + y.bytes, ("x",))


def test_a_foreign_operator_is_not_taken_for_the_aten_one_of_the_same_name():
    x = tensor("x", 4, 8)
    assert price_op("mylib.relu.default", (x,), (tensor("y", 4, 8),)).kind == "unknown"


def test_a_higher_order_operator_is_opaque():
    x = tensor("x", 4, 8)
    assert price_op("higher_order.cond", (x,), (x,)).kind == "opaque"
    assert price_op("tag_activation_checkpoint", (x,), (x,)).kind == "opaque"


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_every_formula_prices_any_call(name):
    """No shape and no missing literal makes a formula fail: 0-dim, empty, one operand, none."""
    x, y, ints = tensor("x", 4, 8), tensor("y", 4, 8), tensor("i", 4, dtype="int64", grad=False)
    scalar, empty = tensor("s"), tensor("e", 0, 8)
    for reads in ((x, y, ints), (x,), (scalar,), (scalar, scalar), (empty, empty), (ints, x), ()):
        for writes in ((y,), (scalar,), (tensor("o", 2), ints), ()):
            cost = price_op(f"aten.{name}.default", reads, writes)
            assert min(cost.flops, cost.backward_flops, cost.bytes, cost.backward_bytes, cost.workspace) >= 0
            assert set(cost.saved) <= {spec.id for spec in (*reads, *writes)}


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_nothing_is_kept_and_the_backward_is_free_without_gradients(name):
    x, y = tensor("x", 2, 4, 8, 8, grad=False), tensor("y", 2, 4, 8, 8, grad=False)
    z = tensor("z", 2, 4, 8, 8, grad=False)
    cost = price_op(f"aten.{name}.default", (x, y, z), (tensor("o", 2, 4, 8, 8, grad=False),))
    assert (cost.saved, cost.workspace, cost.backward_flops, cost.backward_bytes) == ((), 0, 0, 0)


# ---------------------------------------------------------------- products


def test_a_linear_layer_has_one_product_per_gradient_and_keeps_the_other_factor():
    x, w, b, y = tensor("x", 8, 16), weight("w", 32, 16), weight("b", 32), tensor("y", 8, 32)
    flops = 2 * 8 * 16 * 32
    cost = price("linear", (x, w, b), (y,))
    assert (cost.kind, cost.flops, cost.backward_flops) == ("matmul", flops, 2 * flops)
    assert cost.saved == ("w", "x")
    assert cost.bytes == 4 * (8 * 16 + 32 * 16 + 32 + 8 * 32)
    frozen = price("linear", (x, weight("w", 32, 16, grad=False)), (y,))
    assert (frozen.backward_flops, frozen.saved) == (flops, ("w",))
    first = price("linear", (tensor("x", 8, 16, grad=False), w), (y,))
    assert (first.backward_flops, first.saved) == (flops, ("x",))


def test_a_chain_of_linear_layers_costs_six_flops_per_parameter_and_token():
    tokens, width, layers = 64, 32, 5
    total = parameters = 0
    for layer in range(layers):
        w = weight(f"w{layer}", width, width)
        cost = price("linear", (tensor(f"h{layer}", tokens, width), w), (tensor(f"h{layer + 1}", tokens, width),))
        total += cost.flops + cost.backward_flops
        parameters += w.numel
    assert total == 6 * parameters * tokens


def test_addmm_takes_the_summand_first():
    bias, x, w, y = weight("b", 32), tensor("x", 8, 16), weight("w", 16, 32), tensor("y", 8, 32)
    cost = price("addmm", (bias, x, w), (y,))
    assert (cost.flops, cost.saved) == (2 * 8 * 16 * 32, ("w", "x"))


@pytest.mark.parametrize(
    ("equation", "shapes", "result", "flops"),
    [
        ("bij,bjk->bik", ((2, 3, 4), (2, 4, 5)), (2, 3, 5), 2 * 2 * 3 * 4 * 5),
        ("bsd,bte->bsd", ((2, 3, 4), (2, 5, 6)), (2, 3, 4), 2 * 3 * 4),  # t and e are summed first
        ("i,j->ij", ((3,), (4,)), (3, 4), 12),
        ("...ij,...jk->...ik", ((7, 3, 4), (7, 4, 5)), (7, 3, 5), 2 * 7 * 3 * 4 * 5),
        ("ij,jk", ((3, 4), (4, 5)), (3, 5), 2 * 3 * 4 * 5),
    ],
)
def test_einsum_counts_results_times_contracted_sizes(equation, shapes, result, flops):
    reads = [tensor(f"x{number}", *shape) for number, shape in enumerate(shapes)]
    assert price("einsum", reads, (tensor("y", *result),), equation=equation).flops == flops


def test_attention_is_fused_unless_the_mask_needs_a_gradient():
    q, k, v = (tensor(name, 2, 4, 16, 8) for name in "qkv")
    out = tensor("o", 2, 4, 16, 8)
    scores = 2 * 4 * 16 * 16
    fused = price("scaled_dot_product_attention", (q, k, v), (out,))
    assert (fused.flops, fused.backward_flops) == (4 * scores * 8, 10 * scores * 8)
    assert (fused.saved, fused.workspace) == (("q", "k", "v", "o"), 2 * 4 * 16 * 4)
    bias = tensor("m", 2, 4, 16, 16)
    unfused = price("scaled_dot_product_attention", (q, k, v, bias), (out,))
    assert unfused.workspace == 4 * scores + q.bytes + k.bytes
    dropped = price("scaled_dot_product_attention", (q, k, v, bias), (out,), dropout_p=0.1)
    assert dropped.workspace == 3 * 4 * scores + q.bytes + k.bytes


FLOP_CASES = {
    "linear": (functional.linear, ((6, 5, 16), (32, 16))),
    "matmul": (lambda a, b: a @ b, ((3, 6, 16), (3, 16, 8))),
    "bmm": (torch.bmm, ((3, 6, 16), (3, 16, 8))),
    "addmm": (torch.addmm, ((8,), (6, 16), (16, 8))),
    "baddbmm": (torch.baddbmm, ((3, 6, 8), (3, 6, 16), (3, 16, 8))),
    "conv1d": (functional.conv1d, ((2, 4, 16), (8, 4, 3))),
    "conv2d": (functional.conv2d, ((2, 4, 16, 12), (8, 4, 3, 5))),
    "conv3d": (functional.conv3d, ((2, 4, 6, 6, 6), (8, 4, 3, 3, 3))),
    "conv_transpose2d": (functional.conv_transpose2d, ((2, 4, 6, 6), (4, 8, 3, 3))),
}


@pytest.mark.parametrize("name", FLOP_CASES)
def test_flops_agree_with_torch_forward_and_backward(name):
    function, shapes = FLOP_CASES[name]
    values = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with FlopCounterMode(display=False) as forward:
        result = function(*values)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    reads = [tensor(f"x{number}", *shape) for number, shape in enumerate(shapes)]
    cost = price(name, reads, (tensor("y", *result.shape),))
    assert cost.flops == forward.get_total_flops()
    assert cost.backward_flops == backward.get_total_flops()


def test_grouped_convolution_counts_the_channels_of_one_group():
    x, w = tensor("x", 2, 8, 10, 10), weight("w", 16, 2, 3, 3)
    assert price("conv2d", (x, w), (tensor("y", 2, 16, 8, 8),), groups=4).flops == 2 * (2 * 16 * 8 * 8) * (2 * 9)


def test_a_grouped_product_is_known_in_any_namespace_by_its_name_and_its_shapes():
    rows, matrices = tensor("x", 40, 16), weight("w", 8, 16, 32)
    offsets, result = tensor("o", 8, dtype="int32", grad=False), tensor("y", 40, 32)
    own = price("_grouped_mm", (rows, matrices, offsets), (result,))
    assert (own.kind, own.flops, own.saved) == ("matmul", 2 * 40 * 16 * 32, ("w", "x", "o"))
    for name in ("moe.grouped_mm_fallback.default", "grouped_gemm.gmm.default"):
        assert price_op(name, (rows, matrices, offsets), (result,)) == own
    transposed = weight("w", 8, 32, 16)
    assert price_op("moe.grouped_mm.default", (rows, transposed, offsets), (result,)).flops == own.flops
    for name, reads, write in [
        ("moe.grouped_mm.default", (rows, matrices, offsets), tensor("y", 40, 31)),
        ("moe.grouped_mm.default", (rows, tensor("w", 16, 32), offsets), result),
        ("moe.grouped_mm_backward.default", (rows, matrices, offsets), result),
        ("moe.grouped_norm.default", (rows, matrices, offsets), result),
    ]:
        assert price_op(name, reads, (write,)).kind == "unknown"


def test_flat_factors_of_a_grouped_product_contract_the_rows():
    left, right, result = tensor("x", 16, 40), tensor("y", 40, 32), tensor("z", 8, 16, 32)
    assert price("_grouped_mm", (left, right), (result,)).flops == 2 * 16 * 40 * 32


def test_a_transform_grows_with_the_logarithm_and_keeps_nothing():
    x, y = tensor("x", 4, 64, dtype="complex64"), tensor("y", 4, 64, dtype="complex64")
    assert price("fft_fft", (x,), (y,)).flops == 5 * 4 * 64 * 6
    assert price("fft_fftn", (x,), (y,)).flops == 5 * 4 * 64 * 8
    real = price("fft_rfft", (tensor("x", 4, 64),), (tensor("y", 4, 33, dtype="complex64"),))
    assert (real.flops, real.saved, real.workspace) == (int(2.5 * 4 * 64 * 6), (), 0)


def test_weights_of_a_recurrent_layer_need_not_be_parameters():
    x, hx = tensor("x", 4, 10, 32), tensor("h", 1, 4, 64, grad=False)
    made = (tensor("wi", 256, 32), tensor("wh", 256, 64))
    assert price("lstm", (x, hx, hx, *made), (tensor("y", 4, 10, 64),)).flops == 2 * 40 * (256 * 32 + 256 * 64)
    states = (tensor("h", 4, 64), tensor("c", 4, 64))
    assert price("lstm_cell", (tensor("x", 4, 32), *states, *made), states).flops == 2 * 4 * (256 * 32 + 256 * 64)


def test_a_bag_reads_what_it_names_not_its_table():
    table, names = weight("w", 50_000, 16), tensor("i", 12, dtype="int64", grad=False)
    bounds, bags = tensor("o", 3, dtype="int64", grad=False), tensor("y", 3, 16)
    cost = price("embedding_bag", (table, names, bounds), (bags,))
    assert (cost.flops, cost.bytes) == (12 * 16, 4 * 12 * 16 + names.bytes + bounds.bytes + bags.bytes)


def test_a_lattice_of_labels_is_kept():
    scores, labels = tensor("x", 50, 2, 30), tensor("t", 2, 7, dtype="int64", grad=False)
    cost = price("ctc_loss", (scores, labels), (tensor("l"),))
    assert (cost.kind, cost.workspace) == ("loss", 4 * (50 * 2 * 15 + 2))


def test_a_decomposition_is_cubic_and_keeps_its_results():
    a, b, x = tensor("a", 3, 8, 8), tensor("b", 3, 8, 5), tensor("x", 3, 8, 5)
    cost = price("linalg_solve", (a, b), (x,))
    assert (cost.flops, cost.saved) == (int(2 / 3 * 3 * 512) + 2 * 3 * 64 * 5, ("a", "b", "x"))


class Every(nn.Module):
    """Operators of vision, audio and graph models, by their public names."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 6)
        self.speech = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3))
        self.gru = nn.GRU(6, 5, bidirectional=True)
        self.unet = nn.ConvTranspose3d(2, 3, 2, groups=1)

    def forward(self, x, wave, square):
        image = functional.pixel_shuffle(x, 2)
        grid = functional.affine_grid(torch.eye(2, 3).expand(2, 2, 3), [2, 1, 5, 5], align_corners=False)
        image = functional.grid_sample(image, grid, align_corners=False)
        columns = functional.fold(functional.unfold(image, 2), (5, 5), 2)
        scaled = functional.interpolate(columns, scale_factor=2, mode="bicubic", align_corners=False)
        shuffled = functional.adaptive_max_pool2d(functional.channel_shuffle(x, 2), 2) + x.cummax(1)[0].mean()
        spectrum = torch.stft(wave, 8, return_complex=True, window=torch.hann_window(8))
        wave = torch.istft(spectrum, 8, window=torch.hann_window(8)) + torch.fft.irfft2(torch.fft.rfft2(wave)).mean()
        near = torch.searchsorted(torch.cdist(square, square), square) + functional.pairwise_distance(square, square)
        solved = torch.linalg.solve(square + 9 * torch.eye(3), square) @ torch.linalg.inv(square + 9 * torch.eye(3))
        normed = functional.instance_norm(functional.rms_norm(functional.group_norm(x, 2), (4,)))
        bags = self.bag(torch.tensor([0, 1, 2]), torch.tensor([0, 2]))
        speech = self.speech(x.flatten(2)).sum() + self.gru(bags[None])[0].sum() + self.unet(x[None, :, :2]).sum()
        counted = torch.segment_reduce(square, "sum", lengths=torch.tensor([1, 2]), unsafe=True)
        spread = torch.zeros(3, 3).scatter_reduce(0, torch.zeros(3, 3).long(), square, "amax")
        counts = spread.arctan().greater(0.5)
        last = torch.tensordot(square, square, 1) + torch.linalg.multi_dot([square, square, square])
        parts = (scaled, shuffled, wave, near, solved, normed, counted, counts, last)
        return sum((part.sum() for part in parts), speech)


def test_operators_of_vision_audio_and_graph_models_have_formulas():
    args = (torch.randn(2, 4, 4, 4), torch.randn(2, 32), torch.randn(3, 3))
    assert export_graph(Every(), args).unknown_ops == ()


def test_a_recurrent_layer_meets_every_weight_at_every_step():
    x, hx = tensor("x", 4, 10, 32), tensor("h", 1, 4, 64, grad=False)
    weights = (weight("wi", 256, 32), weight("wh", 256, 64), weight("bi", 256), weight("bh", 256))
    cost = price(
        "lstm", (x, hx, hx, *weights), (tensor("y", 4, 10, 64), tensor("hn", 1, 4, 64), tensor("cn", 1, 4, 64))
    )
    flops = 2 * 40 * (256 * 32 + 256 * 64)
    assert (cost.kind, cost.flops, cost.backward_flops) == ("scan", flops, 2 * flops)
    assert cost.workspace == 40 * 17 * 64 * 4


# ---------------------------------------------------------------- what autograd keeps


@pytest.mark.parametrize(
    ("name", "saved"),
    [("gelu", ("x",)), ("silu", ("x",)), ("relu", ("y",)), ("tanh", ("y",)), ("softmax", ("y",)), ("neg", ())],
)
def test_a_pointwise_operator_keeps_operand_result_or_nothing(name, saved):
    assert price(name, (tensor("x", 4, 8),), (tensor("y", 4, 8),)).saved == saved


def test_mul_keeps_the_other_factor_where_it_is_needed():
    x, y, z = tensor("x", 4, 8), tensor("y", 4, 8, grad=False), tensor("z", 4, 8)
    assert price("mul", (x, y), (z,)).saved == ("y",)
    assert price("mul", (x, tensor("y", 4, 8)), (z,)).saved == ("y", "x")
    assert price("mul", (x,), (z,), other=2.0).saved == ()
    assert price("mul", (x,), (z,)).saved == ("x",)


def test_dropout_keeps_a_mask_only_while_it_drops():
    x, y = tensor("x", 4, 8), tensor("y", 4, 8)
    assert (price("dropout", (x,), (y,), p=0.1, train=True).workspace) == 32
    assert price("dropout", (x,), (y,), p=0.1, train=False).workspace == 0
    assert price("dropout", (x,), (y,), p=0.0, train=True).workspace == 0
    assert price("dropout", (x,), (tensor("y", 4, 8, storage="x"),), p=0.1, train=False).kind == "view"


def test_a_result_that_owns_memory_is_a_copy_and_one_that_does_not_is_free():
    x = tensor("x", 4, 8)
    assert price("reshape", (x,), (tensor("y", 32, storage="x"),)).bytes == 0
    copy = price("reshape", (x,), (tensor("y", 32),))
    assert (copy.kind, copy.bytes) == ("movement", 2 * x.bytes)
    cast = price("to", (x,), (tensor("y", 4, 8, dtype="bfloat16"),))
    assert (cast.kind, cast.bytes) == ("movement", 4 * 32 + 2 * 32)


def test_a_slice_is_free_forward_and_fills_a_gradient_backward():
    x, y = tensor("x", 64, 8), tensor("y", 1, 8, storage="x")
    cost = price("slice", (x,), (y,))
    assert (cost.bytes, cost.backward_bytes) == (0, x.bytes + y.bytes)


def test_a_slice_that_takes_everything_is_free_both_ways():
    x = tensor("x", 64, 8)
    assert price("slice", (x,), (tensor("y", 64, 8, storage="x"),)).backward_bytes == 0


def test_an_embedding_reads_what_it_picks_not_its_table():
    table, ids = weight("w", 50_000, 16), tensor("i", 2, 3, dtype="int64", grad=False, role="input")
    out = tensor("y", 2, 3, 16)
    cost = price("embedding", (table, ids), (out,))
    assert cost.bytes == ids.bytes + 2 * out.bytes
    assert cost.backward_bytes > table.bytes  # the gradient is dense
    assert cost.saved == ("i",)


def test_cross_entropy_keeps_a_log_softmax_inside():
    scores, target = tensor("x", 6, 100), tensor("t", 6, dtype="int64", grad=False)
    cost = price("cross_entropy_loss", (scores, target), (tensor("l"),))
    assert (cost.kind, cost.workspace, cost.saved) == ("loss", scores.bytes, ("t",))


# ---------------------------------------------------------------- whole models


class Gpt(nn.Module):
    """Two pre-norm layers with a tied head and the loss inside."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(500, 64)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)]) for _ in "ab"
        )
        self.ups = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in "ab"
        )
        self.dropout = dropout
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids)
        for (norm, qkv, out), up in zip(self.layers, self.ups, strict=True):
            q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in qkv(norm(x)).chunk(3, -1))
            y = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
            )
            x = x + functional.dropout(out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)
            x = x + up(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = self.pair(3, 8)
        self.middle = self.pair(8, 16)
        self.up = nn.ConvTranspose2d(16, 16, 2, 2)
        self.out = self.pair(24, 8)

    @staticmethod
    def pair(source, target):
        first = (nn.Conv2d(source, target, 3, padding=1), nn.GroupNorm(4, target), nn.SiLU())
        return nn.Sequential(
            *first, nn.Conv2d(target, target, 3, padding=1), nn.BatchNorm2d(target), nn.ReLU(inplace=True)
        )

    def forward(self, x):
        skip = self.down(x)
        x = self.middle(functional.max_pool2d(skip, 2))
        return self.out(torch.cat([self.up(x), skip], 1)).mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True)
        self.out = nn.Linear(64, 8)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    # name: model, operands, credible range of predicted / real
    "gpt": (lambda: Gpt(0.0), (torch.zeros(2, 32, dtype=torch.long),), (0.99, 1.02)),
    "gpt-dropout": (lambda: Gpt(0.1), (torch.zeros(2, 32, dtype=torch.long),), (0.99, 1.15)),
    "unet": (Unet, (torch.randn(2, 3, 32, 32),), (0.99, 1.02)),
    "encoder": (encoder, (torch.randn(4, 32, 64),), (0.99, 1.05)),
    "lstm": (Recurrent, (torch.randn(4, 32, 32),), (0.95, 1.10)),
}


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_agree_with_what_autograd_keeps(name):
    make, args, (low, high) = MODELS[name]
    model = make().train()
    graph = export_graph(model, args)
    cost = AnalyticModel().items(graph, range(len(graph.items)), CPU, 1)
    assert graph.unknown_ops == ()
    assert low <= cost.saved_bytes / real_saved_bytes(model, args) <= high


def test_flops_of_a_model_agree_with_torch():
    model, args = Gpt(0.0).train(), (torch.zeros(2, 32, dtype=torch.long),)
    graph = export_graph(model, args)
    with FlopCounterMode(display=False) as counter:
        model(*args)
    # torch counts no pointwise operators, and of attention only the kernels of CUDA.
    assert sum(op.flops for op in graph.ops if op.kind == "matmul") == counter.get_total_flops()


class MegatronLayer(nn.Module):
    """A layer as in Korthikanti et al., section 4.1: unfused attention, three dropouts."""

    def __init__(self, h: int, a: int) -> None:
        super().__init__()
        self.a = a
        self.norms = nn.ModuleList(nn.LayerNorm(h) for _ in "ab")
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        x = x + 1  # the layer's input is an activation
        b, s, h = x.shape
        parts = self.qkv(self.norms[0](x)).view(b, s, 3, self.a, h // self.a).permute(2, 0, 3, 1, 4)
        q, k, v = (parts[i] for i in range(3))
        scores = torch.matmul(q, k.transpose(-1, -2))
        y = torch.matmul(functional.dropout(functional.softmax(scores, -1), 0.1, training=True), v)
        x = x + functional.dropout(self.proj(y.transpose(1, 2).reshape(b, s, h)), 0.1, training=True)
        y = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + functional.dropout(y, 0.1, training=True)


def test_a_megatron_layer_keeps_what_the_paper_says():
    """Arxiv 2205.05198, equation 1: s b h (34 + 5 a s / h) bytes per layer in 16 bits, masks of one byte."""
    b, s, h, a = 2, 64, 128, 4
    layer = MegatronLayer(h, a).to(torch.bfloat16)
    graph = export_graph(layer, (torch.zeros(b, s, h, dtype=torch.bfloat16),))
    keep = sum(spec.bytes for spec in _kept(graph)) + sum(op.workspace for op in graph.ops)
    statistics = 2 * 2 * b * s * ITEM_SIZE["float32"]  # two norms, two figures per row: the paper leaves them out
    assert keep - statistics == pytest.approx(s * b * h * (34 + 5 * a * s / h), rel=1e-9)


def _kept(graph):
    tensors = graph.tensor_map()
    owners = {tensors[name].storage for op in graph.ops for name in op.saved}
    return [tensors[name] for name in owners if tensors[name].role == "activation"]
