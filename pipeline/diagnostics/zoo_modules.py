"""Plain torch modules that people write.

Owns the list of those that are not of any library of models: perceptrons, recurrent nets, attention, mixtures. Knows
nothing of tracing. The one decision: each is what a user would have in a file of their own, so what only works for
models written with export in mind shows here.

Inputs are batch first.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pipeline.diagnostics.trace_zoo import ZooModel
from pipeline.diagnostics.zoo_random import randomize
from pipeline.diagnostics.zoo_vision_modules import BATCH, VISION, Built, one

Build = Callable[[], Built]


class Recurrent(nn.Module):
    """A recurrent layer over embedded tokens, and a head on its last step."""

    def __init__(self, layer: nn.Module, *, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 12, padding_idx=0)
        self.layer = layer
        self.head = nn.Linear(width, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        states, _ = self.layer(self.embedding(tokens))
        return self.head(states[:, -1])


class CellLoop(nn.Module):
    """A recurrent cell called in a Python loop."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """States of all steps."""
        state: Any = None
        states = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, dim=1)


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on one sequence, with a padding mask."""

    def __init__(self, *, causal: bool, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)
        self.causal = causal
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> Any:
        """Attended states, and the weights where they are wanted."""
        length = x.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), 1) if self.causal else None
        states, weights = self.attention(
            x, x, x, key_padding_mask=padded, attn_mask=mask, need_weights=self.need_weights
        )
        return (states, weights) if self.need_weights else states


class GroupedAttention(nn.Module):
    """Grouped queries through `scaled_dot_product_attention`, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(24, 48)
        self.keys_values = nn.Linear(24, 24)
        self.out = nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attended states."""
        batch, length, _ = x.shape
        queries = self.queries(x).view(batch, length, 8, 6).transpose(1, 2)
        keys, values = self.keys_values(x).view(batch, length, 2, 2, 6).permute(2, 0, 3, 1, 4)
        states = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return self.out(states.transpose(1, 2).flatten(2))


class LinearAttention(nn.Module):
    """Kernel attention by cumulative sums."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attended states."""
        queries, keys, values = self.projection(x).chunk(3, dim=-1)
        queries, keys = functional.elu(queries) + 1, functional.elu(keys) + 1
        products = torch.cumsum(torch.einsum("btk,btv->btkv", keys, values), dim=1)
        scale = torch.einsum("btk,btk->bt", queries, torch.cumsum(keys, dim=1))
        return torch.einsum("btk,btkv->btv", queries, products) / scale.unsqueeze(-1)


class DenseMixture(nn.Module):
    """Every expert computes, the gate weighs the best two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mixture."""
        weights, chosen = torch.topk(torch.softmax(self.gate(x), dim=-1), 2)
        dense = torch.zeros(*x.shape[:-1], 5, device=x.device).scatter(-1, chosen, weights)
        outputs = torch.stack([expert(x) for expert in self.experts])
        return torch.einsum("be,ebf->bf", dense, outputs)


class Siamese(nn.Module):
    """One encoder for two inputs, and their similarity."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(11, 24), nn.Tanh(), nn.Linear(24, 8))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> dict[str, torch.Tensor]:
        """Similarity and distance."""
        a, b = self.encoder(left), self.encoder(right)
        return {"similarity": functional.cosine_similarity(a, b), "distance": functional.pairwise_distance(a, b)}


class Bags(nn.Module):
    """Embedding bags of fixed length beside numbers, as recommenders have them."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(101, 10, mode=mode)
        self.head = nn.Linear(14, 1)

    def forward(self, items: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """A score."""
        return torch.sigmoid(self.head(torch.cat([self.bag(items), numbers], dim=-1))).squeeze(-1)


class FactorizationMachine(nn.Module):
    """Second-order interactions of categorical fields."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Embedding(101, 1)
        self.factors = nn.Embedding(101, 6)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        """A score."""
        factors = self.factors(items)
        pairs = factors.sum(1).pow(2) - factors.pow(2).sum(1)
        return self.bias + self.weights(items).sum((1, 2)) + 0.5 * pairs.sum(1)


class Variational(nn.Module):
    """A variational autoencoder's mean path."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 16), nn.SiLU())
        self.mean, self.log_variance = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 20), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The reconstruction and the divergence from the prior."""
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1)
        return self.decoder(mean), divergence


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 101, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


class GraphConvolution(nn.Module):
    """Messages along edges, summed at their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(8, 12), nn.Linear(20, 8)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """New states of the nodes."""
        source, target = edges
        messages = functional.relu(self.message(nodes[source]))
        summed = torch.zeros(nodes.shape[0], 12).index_add(0, target, messages)
        return self.update(torch.cat([nodes, summed], dim=-1))


class Spectral(nn.Module):
    """A Fourier layer: some frequencies weighted by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The filtered signal."""
        spectrum = torch.fft.rfft(x)
        kept = spectrum[..., :5] * torch.view_as_complex(self.weight)
        return torch.fft.irfft(functional.pad(kept, (0, spectrum.shape[-1] - 5)), n=x.shape[-1])


class TransformerPair(nn.Module):
    """`nn.Transformer`: encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 4, 2, 2, 24, batch_first=True)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """States of the decoder."""
        return self.transformer(
            source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        )


class DecoderLayer(nn.Module):
    """`nn.TransformerDecoderLayer`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(16, 4, 24, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """States."""
        return self.layer(x, memory)


class Bilinear(nn.Module):
    """`nn.Bilinear` of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(7, 5, 4)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The product."""
        return self.layer(left, right)


def _tokens(length: int = 9) -> torch.Tensor:
    return torch.randint(1, 101, (BATCH, length))


def _bags(mode: str) -> Built:
    return Bags(mode), {"items": _tokens(6), "numbers": torch.randn(BATCH, 4)}


def _padded() -> torch.Tensor:
    padded = torch.zeros(BATCH, 9, dtype=torch.bool)
    padded[1, -2:] = True
    return padded


def _sequences(**lengths: int) -> dict[str, torch.Tensor]:
    return {name: torch.randn(BATCH, length, 16) for name, length in lengths.items()}


def _activations() -> nn.Module:
    kinds = (nn.ELU(), nn.SELU(), nn.CELU(), nn.Softplus(), nn.Hardswish(), nn.Hardsigmoid(), nn.Mish(), nn.PReLU())
    more = (nn.LeakyReLU(0.2), nn.Softsign(), nn.Tanhshrink(), nn.LogSigmoid(), nn.ReLU6(), nn.Hardtanh())
    layers = [nn.Sequential(nn.Linear(12, 12), kind) for kind in (*kinds, *more)]
    return nn.Sequential(*layers, nn.GLU(), nn.Softmin(-1))


PLAIN: Mapping[str, Build] = {
    "mlp": lambda: one(nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5)), 13),
    "mlp-batch-norm": lambda: one(
        nn.Sequential(nn.Linear(13, 32), nn.BatchNorm1d(32), nn.LeakyReLU(), nn.Linear(32, 5), nn.Softmax(-1)), 13
    ),
    "activations": lambda: one(_activations(), 12),
    "rnn": lambda: (Recurrent(nn.RNN(12, 10, batch_first=True), width=10), {"tokens": _tokens()}),
    "rnn-relu": lambda: (
        Recurrent(nn.RNN(12, 10, nonlinearity="relu", batch_first=True), width=10),
        {"tokens": _tokens()},
    ),
    "lstm": lambda: (Recurrent(nn.LSTM(12, 10, 2, batch_first=True), width=10), {"tokens": _tokens()}),
    "lstm-both-ways": lambda: (
        Recurrent(nn.LSTM(12, 10, bidirectional=True, batch_first=True), width=20),
        {"tokens": _tokens()},
    ),
    "lstm-projected": lambda: (
        Recurrent(nn.LSTM(12, 10, proj_size=6, batch_first=True), width=6),
        {"tokens": _tokens()},
    ),
    "gru": lambda: (Recurrent(nn.GRU(12, 10, 2, batch_first=True), width=10), {"tokens": _tokens()}),
    "gru-both-ways": lambda: (
        Recurrent(nn.GRU(12, 10, bidirectional=True, batch_first=True), width=20),
        {"tokens": _tokens()},
    ),
    "lstm-cell": lambda: (CellLoop(nn.LSTMCell(8, 6)), {"x": torch.randn(BATCH, 5, 8)}),
    "gru-cell": lambda: (CellLoop(nn.GRUCell(8, 6)), {"x": torch.randn(BATCH, 5, 8)}),
    "autoencoder": lambda: one(
        nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 20)), 20
    ),
    "variational-autoencoder": lambda: (Variational(), {"x": torch.randn(BATCH, 20)}),
    "attention": lambda: (
        SelfAttention(causal=False, need_weights=True),
        {"x": torch.randn(BATCH, 9, 24), "padded": _padded()},
    ),
    "attention-causal": lambda: (
        SelfAttention(causal=True, need_weights=False),
        {"x": torch.randn(BATCH, 9, 24), "padded": _padded()},
    ),
    "attention-grouped": lambda: (GroupedAttention(), {"x": torch.randn(BATCH, 9, 24)}),
    "attention-linear": lambda: (LinearAttention(), {"x": torch.randn(BATCH, 9, 16)}),
    "encoder-layer": lambda: one(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 9, 16),
    "encoder-layer-norm-first": lambda: one(
        nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=True, activation="gelu"), 9, 16
    ),
    "decoder-layer": lambda: (DecoderLayer(), _sequences(x=9, memory=7)),
    "transformer": lambda: (TransformerPair(), _sequences(source=9, target=7)),
    "tied-language-model": lambda: (Tied(), {"tokens": _tokens()}),
    "mixture-of-experts": lambda: (DenseMixture(), {"x": torch.randn(BATCH, 16)}),
    "siamese": lambda: (Siamese(), {"left": torch.randn(BATCH, 11), "right": torch.randn(BATCH, 11)}),
    "bilinear": lambda: (Bilinear(), {"left": torch.randn(BATCH, 7), "right": torch.randn(BATCH, 5)}),
    "embedding-bag-sum": lambda: _bags("sum"),
    "embedding-bag-mean": lambda: _bags("mean"),
    "embedding-bag-max": lambda: _bags("max"),
    "factorization-machine": lambda: (FactorizationMachine(), {"items": _tokens(6)}),
    "graph-convolution": lambda: (
        GraphConvolution(),
        {"nodes": torch.randn(6, 8), "edges": torch.randint(0, 5, (2, 11))},
    ),
    "fourier-layer": lambda: (Spectral(), {"x": torch.randn(BATCH, 14)}),
    "norms": lambda: one(
        nn.Sequential(nn.LayerNorm(12), nn.RMSNorm(12), nn.LayerNorm(12, bias=False), nn.LocalResponseNorm(2)), 9, 12
    ),
}
GROUPS: Mapping[str, Mapping[str, Build]] = {"plain modules": PLAIN, "plain vision modules": VISION}


def names() -> Iterator[tuple[str, str]]:
    """Name and group of every plain module."""
    for group, builds in GROUPS.items():
        for name in builds:
            yield name, group


def build(name: str) -> ZooModel:
    """Build one, with every parameter and statistic random."""
    torch.manual_seed(0)
    module, inputs = next(builds[name] for builds in GROUPS.values() if name in builds)()
    randomize(module.eval())
    return ZooModel(module=module, inputs=inputs)
