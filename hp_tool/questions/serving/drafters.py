"""Size of a draft model, which determines its memory."""

from hp_tool.catalog import library
from hp_tool.catalog.models import model as catalogue_model
from hp_tool.catalog.models import published_precision
from hp_tool.cost.serving.candidates import Drafter
from hp_tool.cost.serving.weights import weight_format
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.inference import SpeculativeSpec
from hp_tool.domain.model import ModelSpec

EAGLE3_VOCABULARY = 32_000
"""Vocabulary size of an EAGLE-3 head (arXiv 2503.01840; `draft_vocab_size` of its checkpoints)."""
EAGLE_MLP_WIDTH = 4
"""MLP width that is assumed for a head if the target model has no dense layers, in multiples of the
hidden size.
"""


def drafter(
    speculative: SpeculativeSpec | None, *, model: ModelSpec, gpu: GpuSpec
) -> Drafter | None:
    """Return the draft model that the query names; None if it names none or if the size is unknown.

    A catalogue model has its published precision. An EAGLE head is one 16-bit layer with the target
    model's sizes. In EAGLE and EAGLE-2, a matrix projects the concatenated embedding and hidden
    state to the hidden size. In EAGLE-3, a matrix projects three hidden states, attention reads two
    inputs, and the head has its own output layer. Heads use the target model's embedding.
    """
    name = None if speculative is None else speculative.draft_model
    if name is None:
        return None
    wide = weight_format("bf16", gpu=gpu)[0]
    if library.has_entry("models", name):
        drafts = catalogue_model(name)
        stored = weight_format(published_precision(name), gpu=gpu)[0]  # type: ignore[arg-type]
        ends = (1 if drafts.tie_word_embeddings else 2) * drafts.vocab_size * drafts.hidden_size
        return Drafter(model=drafts, layer_bytes=stored, end_weights=ends)
    if "eagle" not in name.lower():
        return None
    h = model.hidden_size
    dense = model.num_experts is None or model.first_k_dense_replace
    head = ModelSpec(
        name=name,
        num_hidden_layers=1,
        hidden_size=h,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_size,
        intermediate_size=model.ffn_size if dense else EAGLE_MLP_WIDTH * h,
        vocab_size=EAGLE3_VOCABULARY,
        gated_mlp=True,
    )
    inputs = (model.num_attention_heads + 2 * model.kv_heads) * model.head_size
    third = 3 * h + EAGLE3_VOCABULARY + inputs
    narrowed = third if "eagle3" in name.lower().replace("-", "") else 2 * h
    return Drafter(model=head, layer_bytes=wide, end_weights=narrowed * h)


def drafter_sentence(speculative: SpeculativeSpec | None, found: Drafter | None) -> str | None:
    """Return a sentence which states that the memory of a draft model of unknown size is not
    counted; None in all other cases.
    """
    name = None if speculative is None else speculative.draft_model
    if name is None or found is not None:
        return None
    return f"Memory of the draft model {name} is not counted: the catalogue does not have it"
