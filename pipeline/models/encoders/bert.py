"""BERT and RoBERTa in Flax NNX, with their heads.

Owns the module tree, whose leaf paths are the target of the conversion rules, and the forward pass in evaluation:
dropout is not computed. Knows nothing of checkpoints. The one decision: inputs and outputs are dicts by torch's names,
so the same inputs go into both frameworks.

Leaf paths: `embeddings.{word,position,token_type}.embedding`, `embeddings.norm.{scale,bias}`,
`layers.I.attention.{q,k,v,o}_proj`, `layers.I.mlp.{fc1,fc2}`, `layers.I.{attention,output}_norm`, `pooler`, and of the
heads `lm_head.{dense,norm,bias}` (with `decoder` where not tied), `classifier` (RoBERTa:
`classifier.{dense,out_proj}`), `qa_outputs`.

Shape suffixes: B batch, T tokens, D hidden, V vocabulary, L labels.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from pipeline.models.encoders.activations import ACTIVATION_BY_NAME
from pipeline.models.encoders.attention import Attention, padding_mask
from pipeline.models.encoders.bert_config import BertConfig, BertHead
from pipeline.models.encoders.layers import Embedding, check_length, layer_norm
from pipeline.models.encoders.mlp import Mlp
from pipeline.models.variables import tap


class BertEmbeddings(nnx.Module):
    """Words, positions and token types, summed and normalised."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        self.word = Embedding(config.vocab_size, size, rngs=rngs)
        self.position = Embedding(config.max_position_embeddings, size, rngs=rngs)
        self.token_type = Embedding(config.type_vocab_size, size, rngs=rngs)
        self.norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)
        self.padding = config.pad_token_id if config.counts_positions else None

    def __call__(self, tokens_BT: jax.Array, *, types_BT: jax.Array | None) -> jax.Array:
        """int32 [B, T] to [B, T, D]."""
        if self.padding is None:
            positions_BT = jnp.arange(tokens_BT.shape[1])[None]
        else:
            is_token_BT = (tokens_BT != self.padding).astype(jnp.int32)
            positions_BT = jnp.cumsum(is_token_BT, axis=1) * is_token_BT + self.padding
        types_BT = jnp.zeros_like(tokens_BT) if types_BT is None else types_BT
        return self.norm(self.word(tokens_BT) + self.token_type(types_BT) + self.position(positions_BT))


class BertLayer(nnx.Module):
    """One layer, norms after."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        size, heads = config.hidden_size, config.num_attention_heads
        self.attention = Attention(size=size, num_heads=heads, head_dim=size // heads, biases="qkvo", rngs=rngs)
        self.attention_norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)
        self.mlp = Mlp(size=size, inner=config.intermediate_size, activation=config.hidden_act, rngs=rngs)
        self.output_norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, *, seen: jax.Array | None) -> jax.Array:
        """[B, T, D] to [B, T, D]."""
        x_BTD = self.attention_norm(x_BTD + self.attention(x_BTD, seen=seen))
        return self.output_norm(x_BTD + self.mlp(x_BTD))


class MaskedLmHead(nnx.Module):
    """Logits of every token; the last product is the word embedding where the config ties them."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        self.dense = nnx.Linear(size, size, rngs=rngs)
        self.norm = layer_norm(size, eps=config.layer_norm_eps, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((config.vocab_size,)))
        if not config.tie_word_embeddings:
            self.decoder = nnx.Linear(size, config.vocab_size, use_bias=False, rngs=rngs)
        # RoBERTa's head has a GELU of its own, whatever the layers compute.
        self.activation = ACTIVATION_BY_NAME[config.hidden_act if config.model_type == "bert" else "gelu"]

    def __call__(self, x_BTD: jax.Array, *, words: Embedding) -> jax.Array:
        """[B, T, D] to [B, T, V]."""
        x_BTD = self.norm(self.activation(self.dense(x_BTD)))
        logits_BTV = self.decoder(x_BTD) if hasattr(self, "decoder") else words.attend(x_BTD)
        return logits_BTV + self.bias[...]


class RobertaClassifier(nnx.Module):
    """RoBERTa classifies its first token, through a layer of its own in place of a pooler."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(config.hidden_size, config.hidden_size, rngs=rngs)
        self.out_proj = nnx.Linear(config.hidden_size, config.num_labels, rngs=rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        """[B, D] to [B, L]."""
        return self.out_proj(jnp.tanh(self.dense(x_BD)))


class Bert(nnx.Module):
    """The encoder with the head that its config names."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        self.config = config
        self.embeddings = BertEmbeddings(config, rngs=rngs)
        self.layers = nnx.List([BertLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        if config.has_pooler:
            self.pooler = nnx.Linear(size, size, rngs=rngs)
        if config.head is BertHead.MASKED_LM:
            self.lm_head = MaskedLmHead(config, rngs=rngs)
        elif config.head is BertHead.SEQUENCE and not config.has_pooler:
            self.classifier = RobertaClassifier(config, rngs=rngs)
        elif config.head in (BertHead.SEQUENCE, BertHead.TOKEN):
            self.classifier = nnx.Linear(size, config.num_labels, rngs=rngs)
        elif config.head is BertHead.SPAN:
            self.qa_outputs = nnx.Linear(size, config.num_labels, rngs=rngs)

    def __call__(
        self,
        input_ids: jax.Array,
        *,
        attention_mask: jax.Array | None = None,
        token_type_ids: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Run the encoder and its head.

        Args:
            input_ids: int32 [B, T].
            attention_mask: [B, T], ones and zeros; nothing is padding where None.
            token_type_ids: int32 [B, T]; zeros where None.

        Returns:
            `last_hidden_state` [B, T, D] and `pooler_output` [B, D] of the base model; `logits` of a head ([B, T, V],
            [B, L] or [B, T, L]); `start_logits` and `end_logits` [B, T] of the span head.

        Raises:
            ValueError: the texts are longer than the stored positions.
        """
        check_length("input_ids", input_ids, longest=self.config.longest_text)
        seen = padding_mask(attention_mask)
        x_BTD = tap("embeddings", self.embeddings(input_ids, types_BT=token_type_ids))
        for index, layer in enumerate(self.layers):
            x_BTD = tap(f"layers.{index}", layer(x_BTD, seen=seen))
        pooled_BD = tap("pooler", jnp.tanh(self.pooler(x_BTD[:, 0]))) if self.config.has_pooler else None
        match self.config.head:
            case BertHead.NONE:
                return {"last_hidden_state": x_BTD, **({} if pooled_BD is None else {"pooler_output": pooled_BD})}
            case BertHead.MASKED_LM:
                return {"logits": self.lm_head(x_BTD, words=self.embeddings.word)}
            case BertHead.SEQUENCE:
                return {"logits": self.classifier(x_BTD[:, 0] if pooled_BD is None else pooled_BD)}
            case BertHead.TOKEN:
                return {"logits": self.classifier(x_BTD)}
            case BertHead.SPAN:
                start_BT1, end_BT1 = jnp.split(self.qa_outputs(x_BTD), 2, axis=-1)
                return {"start_logits": start_BT1[..., 0], "end_logits": end_BT1[..., 0]}
