"""Small models of many architectures, built from configurations."""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn
from torch._higher_order_ops import scan
from torch.nn import functional

from partita import Example

VOCABULARY = 96
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _ids(rows=4, length=12):
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def _decoder(name, **options):
    def build():
        config = getattr(hf, f"{name}Config")(**(TEXT | {"use_cache": False} | SPECIAL | options))
        return getattr(hf, f"{name}ForCausalLM")(config), Example(kwargs={"input_ids": _ids(), "labels": _ids()})

    return build


def _encoder(name, **options):
    def build():
        config = getattr(hf, f"{name}Config")(**(TEXT | QUIET | options))
        mask = torch.ones(4, 12, dtype=torch.long)
        mask[1:, 9:] = 0
        kwargs = {"input_ids": _ids(), "attention_mask": mask, "labels": _ids()}
        return getattr(hf, f"{name}ForMaskedLM")(config), Example(kwargs=kwargs)

    return build


def _seq2seq(name, **options):
    def build():
        config = getattr(hf, f"{name}Config")(
            **({"vocab_size": VOCABULARY, "decoder_start_token_id": 2, "use_cache": False} | SPECIAL | options)
        )
        return getattr(hf, f"{name}ForConditionalGeneration")(config), Example(
            kwargs={"input_ids": _ids(), "labels": _ids(4, 8)}
        )

    return build


def _image(name, size=32, **options):
    def build():
        config = getattr(hf, f"{name}Config")(**options)
        config.num_labels = 5
        pixels = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(2))
        return getattr(hf, f"{name}ForImageClassification")(config), Example(
            kwargs={"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 3])}
        )

    return build


def _gemma3():
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    config = hf.Gemma3TextConfig(**(TEXT | SPECIAL | sizes))
    return hf.Gemma3ForCausalLM(config), Example(kwargs={"input_ids": _ids(), "labels": _ids()})


BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0,
        "activation_dropout": 0.0, "max_position_embeddings": 64}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}


def _whisper():
    config = hf.WhisperConfig(
        **(
            BART
            | {
                "vocab_size": VOCABULARY,
                "num_mel_bins": 8,
                "max_source_positions": 16,
                "max_target_positions": 16,
                "decoder_start_token_id": 2,
            }
            | SPECIAL
        )
    )
    sound = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(3))
    return hf.WhisperForConditionalGeneration(config), Example(kwargs={"input_features": sound, "labels": _ids(4, 8)})


def _wav2vec2():
    silent = dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "layerdrop"), 0.0
    )
    layers = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4)}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0}
    sound = torch.randn(4, 800, generator=torch.Generator().manual_seed(4))
    return hf.Wav2Vec2Model(hf.Wav2Vec2Config(**(TEXT | silent | layers | places))), Example(
        kwargs={"input_values": sound}
    )


def _clip():
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    config = hf.CLIPConfig(text_config=text | SPECIAL, vision_config=vision, projection_dim=16)
    kwargs = {
        "input_ids": _ids(),
        "pixel_values": torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(5)),
        "return_loss": True,
    }
    return hf.CLIPModel(config), Example(kwargs=kwargs)


class UNet(nn.Module):
    """A U-Net with skips, over 2 or 3 dims."""

    def __init__(self, dims, width=8):
        super().__init__()
        conv, up = (nn.Conv2d, nn.ConvTranspose2d) if dims == 2 else (nn.Conv3d, nn.ConvTranspose3d)
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            nn.Sequential(conv(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())
            for a, b in zip([1, *sizes], sizes, strict=False)
        )
        self.up = nn.ModuleList(up(b, a, 2, 2) for a, b in zip(sizes[-2::-1], sizes[:0:-1], strict=True))
        self.merge = nn.ModuleList(conv(2 * a, a, 3, padding=1) for a in sizes[-2::-1])
        self.out = conv(width, 1, 1)
        self.pool = functional.max_pool2d if dims == 2 else functional.max_pool3d

    def forward(self, x):
        skips = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else self.pool(x, 2))
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = functional.silu(merge(torch.cat([up(x), skip], 1)))
        return self.out(x)


class LanguageLSTM(nn.Module):
    """An LSTM language model."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm, self.head = (
            nn.Embedding(VOCABULARY, 16),
            nn.LSTM(16, 24, 2, batch_first=True),
            nn.Linear(24, VOCABULARY),
        )

    def forward(self, ids):
        return self.head(self.lstm(self.words(ids))[0])


class DepthAdaptive(nn.Module):
    """A transformer encoder that runs or skips each layer as the values ask, by ``torch.cond``."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.gates = nn.ModuleList(nn.Linear(32, 1) for _ in range(4))

    def forward(self, ids):
        hidden = self.words(ids)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            wanted = gate(hidden.mean((0, 1))).detach() > 0
            hidden = torch.cond(wanted, layer, lambda given: given.clone(), (hidden,))
        return self.head(hidden)


class StateSpace(nn.Module):
    """A language model whose linear recurrence over time is a scan in the model's own forward."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.inputs, self.outputs = (nn.ModuleList(nn.Linear(32, 32) for _ in range(4)) for _ in range(2))
        self.decay = nn.Parameter(torch.randn(4, 32))

    def forward(self, ids):
        hidden = self.words(ids)
        for inward, outward, decay in zip(self.inputs, self.outputs, self.decay, strict=True):

            def step(state, given, decay=decay):
                state = state * torch.sigmoid(decay) + given
                return state, state.clone()

            _, states = scan(step, torch.zeros_like(hidden[:, 0]), inward(hidden), dim=1)
            hidden = hidden + outward(functional.gelu(states))
        return self.head(hidden)


class Recommender(nn.Module):
    """Embedding tables, a bottom and a top network, pairwise products (DLRM-like)."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, sparse):
        low = self.bottom(dense)
        parts = torch.stack([low, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        i, j = torch.triu_indices(5, 5, 1)
        return self.top(torch.cat([low, products[:, i, j]], 1))


class GraphNet(nn.Module):
    """Message passing over edges; there is no batch axis."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))
        self.enter = nn.Linear(4, 8)

    def forward(self, nodes, edges):
        h = self.enter(nodes)
        for layer in self.layers:
            messages = layer(torch.cat([h[edges[0]], h[edges[1]]], 1)).relu()
            h = h + torch.zeros_like(h).index_add(0, edges[1], messages)
        return h


class Spiking(nn.Module):
    """Leaky integrate-and-fire neurons with a surrogate gradient, unrolled over time."""

    class Spike(torch.autograd.Function):
        """Step forward, fast sigmoid backward."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x > 0).to(x.dtype)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient / (1 + 10 * x.abs()) ** 2

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        state = [x.new_zeros(x.shape[0], 12) for _ in self.layers]
        total = 0
        for _ in range(5):
            h = x
            for i, layer in enumerate(self.layers):
                state[i] = 0.9 * state[i] + layer(h)
                h = self.Spike.apply(state[i] - 1.0)
            total = total + self.out(h)
        return total


def _own(make, *args):
    return lambda: (make(), Example(args=args))


def _random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(6))


ZOO = {
    "gpt2": lambda: (
        hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=32,
                n_embd=32,
                n_layer=4,
                n_head=4,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                **SPECIAL,
            )
        ),
        Example(kwargs={"input_ids": _ids(), "labels": _ids()}),
    ),
    "gpt_neox": _decoder("GPTNeoX"),
    "llama": _decoder("Llama", num_key_value_heads=2),
    "mistral": _decoder("Mistral", num_key_value_heads=2),
    "qwen3": _decoder("Qwen3", num_key_value_heads=2, head_dim=8),
    "gemma2": _decoder("Gemma2", num_key_value_heads=2, head_dim=8),
    "gemma3": _gemma3,
    "phi": _decoder("Phi", resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
    "falcon": _decoder("Falcon", alibi=False, hidden_dropout=0.0, attention_dropout=0.0),
    "opt": lambda: (
        hf.OPTForCausalLM(
            hf.OPTConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                ffn_dim=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                max_position_embeddings=32,
                dropout=0.0,
                word_embed_proj_dim=32,
                use_cache=False,
                **SPECIAL,
            )
        ),
        Example(kwargs={"input_ids": _ids(), "labels": _ids()}),
    ),
    "bloom": lambda: (
        hf.BloomForCausalLM(
            hf.BloomConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                n_layer=4,
                n_head=4,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                use_cache=False,
                **SPECIAL,
            )
        ),
        Example(kwargs={"input_ids": _ids(), "labels": _ids()}),
    ),
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta", pad_token_id=1),
    "deberta": _encoder("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    "electra": _encoder("Electra", embedding_size=16),
    "albert": _encoder("Albert", embedding_size=16, num_hidden_groups=2, classifier_dropout_prob=0.0),
    "t5": _seq2seq(
        "T5", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0
    ),
    "bart": _seq2seq("Bart", **BART),
    "pegasus": _seq2seq("Pegasus", **BART),
    "whisper": _whisper,
    "wav2vec2": _wav2vec2,
    "vit": _image(
        "ViT",
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        **QUIET,
    ),
    "swin": _image(
        "Swin",
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
        **QUIET,
    ),
    "convnext": _image("ConvNext", hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 2, 1], drop_path_rate=0.0),
    "resnet": _image("ResNet", embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2]),
    "segformer": _image(
        "Segformer",
        hidden_sizes=[8, 16, 32, 64],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        **QUIET,
    ),
    "clip": _clip,
    "mixtral": _decoder("Mixtral", **MOE),
    "deepseek_v3": _decoder(
        "DeepseekV3",
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_shared_experts=1,
        num_key_value_heads=4,
    ),
    "gpt_oss": _decoder("GptOss", num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "mamba": lambda: (
        hf.MambaForCausalLM(
            hf.MambaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                state_size=4,
                num_hidden_layers=4,
                time_step_rank=4,
                use_cache=False,
                **SPECIAL,
            )
        ),
        Example(kwargs={"input_ids": _ids(), "labels": _ids()}),
    ),
    "rwkv": lambda: (
        hf.RwkvForCausalLM(
            hf.RwkvConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                attention_hidden_size=32,
                num_hidden_layers=4,
                intermediate_size=64,
                use_cache=False,
                **SPECIAL,
            )
        ),
        Example(kwargs={"input_ids": _ids(), "labels": _ids()}),
    ),
    "unet_2d": _own(lambda: UNet(2), _random(4, 1, 16, 16)),
    "unet_3d": _own(lambda: UNet(3), _random(4, 1, 8, 8, 8)),
    "lstm": _own(LanguageLSTM, _ids()),
    "recommender": _own(
        Recommender, _random(6, 5), torch.randint(0, 50, (6, 4, 3), generator=torch.Generator().manual_seed(7))
    ),
    "graph_net": _own(
        GraphNet, _random(7, 4), torch.randint(0, 7, (2, 15), generator=torch.Generator().manual_seed(8))
    ),
    "depth_adaptive": _own(DepthAdaptive, _ids()),
    "state_space": _own(StateSpace, _ids()),
    "spiking": _own(Spiking, _random(6, 12)),
}
"""Name to a function that gives a model and an example of its call."""
