"""Sizes and choices of a BERT or RoBERTa, read from a transformers config.

Owns the config. Loads no framework. The one decision: RoBERTa is BERT with positions counted from the tokens and other
heads, so both are values of one config.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipeline.models.encoders.config_fields import POOLER_KEY, ConfigFields


class BertHead(StrEnum):
    """What stands on the hidden states; the end of the name of torch's class."""

    NONE = "Model"
    MASKED_LM = "ForMaskedLM"
    SEQUENCE = "ForSequenceClassification"
    TOKEN = "ForTokenClassification"
    SPAN = "ForQuestionAnswering"


CLASS_PREFIXES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig:
    """Names are those of transformers where it has one."""

    model_type: str
    head: BertHead
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    pad_token_id: int
    num_labels: int
    tie_word_embeddings: bool
    has_pooler: bool

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "BertConfig":
        """Read a transformers config; an absent optional key has the default of transformers.

        Raises:
            ParameterError: it asks for something the module does not compute; all complaints at once.
        """
        fields = ConfigFields(config)
        model_type = fields.choice("model_type", tuple(CLASS_PREFIXES), default="bert")
        heads = {CLASS_PREFIXES.get(model_type, "") + head: head for head in BertHead}
        head = heads.get(fields.architecture(tuple(heads)), BertHead.NONE)
        hidden = fields.size("hidden_size", 768)
        fields.refuse("is_decoder", unless=(False,), why="a decoder's causal attention is not computed")
        fields.refuse("add_cross_attention", unless=(False,), why="cross-attention is not computed")
        fields.refuse("position_embedding_type", unless=("absolute",), why="only absolute positions are computed")
        parsed = cls(
            model_type=model_type,
            head=head,
            vocab_size=fields.size("vocab_size", 50265 if model_type == "roberta" else 30522),
            hidden_size=hidden,
            num_hidden_layers=fields.size("num_hidden_layers", 12),
            num_attention_heads=fields.heads("num_attention_heads", 12, of="hidden_size", size=hidden),
            intermediate_size=fields.size("intermediate_size", 3072),
            hidden_act=fields.activation("hidden_act", default="gelu"),
            max_position_embeddings=fields.size("max_position_embeddings", 512),
            type_vocab_size=fields.size("type_vocab_size", 2),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
            pad_token_id=fields.token("pad_token_id", 0 if model_type == "bert" else 1),
            num_labels=fields.num_labels(),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
            has_pooler=_has_pooler(model_type, head, asked=fields.flag(POOLER_KEY, default=True)),
        )
        fields.check()
        return parsed

    @property
    def counts_positions(self) -> bool:
        """True where positions follow from the tokens: `pad_token_id + 1` upwards, padding itself at `pad_token_id`."""
        return self.model_type != "bert"

    @property
    def longest_text(self) -> int:
        """Tokens that have a position."""
        return self.max_position_embeddings - (self.pad_token_id + 1 if self.counts_positions else 0)


def _has_pooler(model_type: str, head: BertHead, *, asked: bool) -> bool:
    """A base model has one unless told otherwise; of the heads only BERT's sequence classifier reads it."""
    return asked if head is BertHead.NONE else head is BertHead.SEQUENCE and model_type == "bert"
