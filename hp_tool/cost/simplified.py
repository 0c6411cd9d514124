"""What an estimate counts in a simpler form than the model has: said in its provenance, never silently."""

from __future__ import annotations

from hp_tool.domain.model import ModelSpec


def simplified(model: ModelSpec) -> dict[str, object]:
    """provenance's `simplified` entry, a list of sentences; nothing where the model is counted whole."""
    found = []
    if model.norms_per_layer != 2 or model.query_key_norm is not None or model.embedding_norm:
        found.append("norms: all count as parameters, their time and activations are those of two a layer")
    if model.attention_sinks:
        found.append("attention_sinks: counted as parameters alone")
    if model.expert_bias:
        found.append("expert_bias: counted as parameters alone, divided like the experts' matrices")
    return {"simplified": found} if found else {}
