"""Released models beside those of the catalogue's tests: what decides their size in config.json, and their parameters.

The counts are those of the published weights, tied matrices once.
"""

from __future__ import annotations

from typing import Any

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gemma-2-9b": (
        {"model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16, "head_dim": 256,
         "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 256000, "sliding_window": 4096},
        9_241_705_984,
    ),
    "gemma-3-1b": (
        {"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4, "head_dim": 256,
         "num_key_value_heads": 1, "intermediate_size": 6912, "vocab_size": 262144, "sliding_window": 512},
        999_885_952,
    ),
    "phi-2": (
        {"model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
         "intermediate_size": 10240, "vocab_size": 51200, "tie_word_embeddings": False},
        2_779_683_840,
    ),
    "opt-1.3b": (
        {"model_type": "opt", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192,
         "max_position_embeddings": 2048, "vocab_size": 50272, "word_embed_proj_dim": 2048},
        1_315_758_080,
    ),
    "bloom-7b1": (
        {"model_type": "bloom", "hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880},
        7_069_016_064,
    ),
    "falcon-7b": (
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True,
         "parallel_attn": True, "bias": False, "new_decoder_architecture": False, "vocab_size": 65024},
        6_921_720_704,
    ),
    "pythia-6.9b": (
        {"model_type": "gpt_neox", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "intermediate_size": 16384, "vocab_size": 50432, "tie_word_embeddings": False},
        6_857_302_016,
    ),
    "starcoder2-3b": (
        {"model_type": "starcoder2", "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24,
         "num_key_value_heads": 2, "intermediate_size": 12288, "vocab_size": 49152, "use_bias": True, "sliding_window": 4096},
        3_030_371_328,
    ),
    "command-r": (
        {"model_type": "cohere", "hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64,
         "num_key_value_heads": 64, "intermediate_size": 22528, "vocab_size": 256000, "use_qk_norm": False},
        34_980_831_232,
    ),
    "stablelm-3b-4e1t": (
        {"model_type": "stablelm", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 32, "intermediate_size": 6912, "vocab_size": 50304, "tie_word_embeddings": False},
        2_795_443_200,
    ),
    "smollm3-3b": (
        {"model_type": "smollm3", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
         "num_key_value_heads": 4, "intermediate_size": 11008, "vocab_size": 128256},
        3_075_098_624,
    ),
    "qwen1.5-moe-a2.7b": (
        {"model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
         "num_key_value_heads": 16, "intermediate_size": 5632, "moe_intermediate_size": 1408, "num_experts": 60,
         "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "vocab_size": 151936,
         "tie_word_embeddings": False},
        14_315_784_192,
    ),
    "gpt-oss-120b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "head_dim": 64,
         "num_key_value_heads": 8, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
         "vocab_size": 201088, "attention_bias": True, "sliding_window": 128, "tie_word_embeddings": False},
        116_829_156_672,
    ),
    "roberta-base": (
        {"model_type": "roberta", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "max_position_embeddings": 514, "type_vocab_size": 1, "vocab_size": 50265},
        124_697_433,
    ),
    "modernbert-base": (
        {"model_type": "modernbert", "hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12,
         "intermediate_size": 1152, "vocab_size": 50368, "global_attn_every_n_layers": 3, "local_attention": 128},
        149_655_232,
    ),
    "bart-large": (
        {"model_type": "bart", "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
         "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "max_position_embeddings": 1024,
         "vocab_size": 50265},
        406_291_456,
    ),
}  # fmt: skip
