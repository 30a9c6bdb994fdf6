"""BERT, RoBERTa and XLM-RoBERTa checkpoints as transformers writes them (MiniLM among them).

Owns the rule table of the three and its layout facts. Knows nothing of files. The one decision: what a checkpoint holds
beyond its model (the pooler of a model that does not pool, the head of the next sentence) is carried and goes back.
"""

from collections.abc import Collection, Mapping
from typing import Any

from converters.families.layer_rules import KERNEL_LAYOUTS, embedding, layer_norm, linear
from converters.families.table import FamilyTable, Tie
from converters.rules import Rule
from pipeline.models.encoders.bert_config import BertConfig, BertHead

_PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta."}
_OURS = "layers.{layer}"
_PARTS, _FIRST_PARTS = ("weight", "bias"), ("gamma", "beta")
_FIRST_SUFFIX = "LayerNorm.gamma"
"""Checkpoints that were TensorFlow's once call the parts of a norm so."""


def table(config: Mapping[str, Any], names: Collection[str] = ()) -> FamilyTable:
    """The table for one checkpoint, from its transformers config.

    Raises:
        ParameterError: the config asks for what the module does not compute.
    """
    parsed = BertConfig.from_dict(config)
    whole = _PREFIXES[parsed.model_type]
    prefix = "" if parsed.head is BertHead.NONE else whole
    parts = _FIRST_PARTS if any(name.endswith(_FIRST_SUFFIX) for name in names) else _PARTS
    head_rules, ties, carried = _head(parsed, words=f"{prefix}embeddings.word_embeddings.weight", parts=parts)
    pooler = f"{prefix}pooler.dense"
    blocks = [("embeddings", "embeddings"), ("encoder.layer.{layer}", _OURS)]
    blocks += [("pooler", "pooler")] if parsed.has_pooler else []
    return FamilyTable(
        family=parsed.model_type,
        facts=_facts(parsed),
        rules=(
            *_encoder_rules(prefix, parts=parts),
            *(linear(pooler, "pooler") if parsed.has_pooler else ()),
            *head_rules,
        ),
        ignored=(f"{prefix}embeddings.position_ids", f"{prefix}embeddings.token_type_ids"),
        ties=ties,
        hints={
            "pooler.{part:word}": "if the model was saved without its pooler, write add_pooling_layer: false into "
            "config.json"
        },
        prefixes=(whole, ""),
        carried=(*carried, *(() if parsed.has_pooler else (f"{pooler}.{{part:word}}",))),
        blocks=tuple((prefix + theirs, ours) for theirs, ours in blocks),
    )


def _encoder_rules(prefix: str, *, parts: tuple[str, str]) -> list[Rule]:
    layer = f"{prefix}encoder.layer.{{layer}}"
    rules = layer_norm(f"{prefix}embeddings.LayerNorm", "embeddings.norm", parts=parts)
    for kind in ("word", "position", "token_type"):
        rules.append(embedding(f"{prefix}embeddings.{kind}_embeddings", f"embeddings.{kind}"))
    for theirs, ours in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        rules += linear(f"{layer}.attention.self.{theirs}", f"{_OURS}.attention.{ours}")
    rules += linear(f"{layer}.attention.output.dense", f"{_OURS}.attention.o_proj")
    rules += layer_norm(f"{layer}.attention.output.LayerNorm", f"{_OURS}.attention_norm", parts=parts)
    rules += linear(f"{layer}.intermediate.dense", f"{_OURS}.mlp.fc1")
    rules += linear(f"{layer}.output.dense", f"{_OURS}.mlp.fc2")
    rules += layer_norm(f"{layer}.output.LayerNorm", f"{_OURS}.output_norm", parts=parts)
    return rules


def _head(
    config: BertConfig, *, words: str, parts: tuple[str, str]
) -> tuple[list[Rule], tuple[Tie, ...], tuple[str, ...]]:
    """Rules, ties and carried tensors of the head."""
    match config.head:
        case BertHead.NONE:
            return [], (), ()
        case BertHead.MASKED_LM:
            return _masked_lm(config, words=words, parts=parts)
        case BertHead.SEQUENCE if config.model_type != "bert":
            names = ("classifier.dense", "classifier.out_proj")
            return [rule for name in names for rule in linear(name, name)], (), ()
        case BertHead.SEQUENCE | BertHead.TOKEN:
            return linear("classifier", "classifier"), (), ()
        case BertHead.SPAN:
            return linear("qa_outputs", "qa_outputs"), (), ()


def _masked_lm(
    config: BertConfig, *, words: str, parts: tuple[str, str]
) -> tuple[list[Rule], tuple[Tie, ...], tuple[str, ...]]:
    if config.model_type == "bert":
        head, dense, norm = "cls.predictions", "transform.dense", "transform.LayerNorm"
    else:
        head, dense, norm, parts = "lm_head", "dense", "layer_norm", _PARTS
    rules = [
        *linear(f"{head}.{dense}", "lm_head.dense"),
        *layer_norm(f"{head}.{norm}", "lm_head.norm", parts=parts),
    ]
    carried: tuple[str, ...] = ("cls.seq_relationship.{part:word}",)
    decoder, bias = f"{head}.decoder", f"{head}.bias"
    if config.tie_word_embeddings:
        ties = (Tie(tensor=f"{decoder}.weight", same_as=words), Tie(tensor=f"{decoder}.bias", same_as=bias))
        return [*rules, Rule.one(bias, "lm_head.bias")], ties, carried
    # Untied, torch adds the decoder's own bias and never reads the other.
    rules += [*linear(decoder, "lm_head.decoder", has_bias=False), Rule.one(f"{decoder}.bias", "lm_head.bias")]
    return rules, (), (*carried, bias)


def _facts(config: BertConfig) -> dict[str, Any]:
    return {
        "activation": config.hidden_act,
        "add_pooling_layer": config.has_pooler,
        "attention_scale": "head_dim ** -0.5",
        "head": config.head.value,
        "kernel_layout": KERNEL_LAYOUTS["linear"],
        "norm": "layer",
        "norm_eps": config.layer_norm_eps,
        "norm_places": "after",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_labels": config.num_labels,
        "positions": "learned, counted from the tokens" if config.counts_positions else "learned",
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
    }
