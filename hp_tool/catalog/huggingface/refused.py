"""model_types that ModelSpec cannot hold, with the reason that a user is given."""

from __future__ import annotations

_RECURRENT = "its layers are recurrent, state-space or convolutional in part"
_TOWERS = "it joins a language model with vision or audio towers; give the language model's text_config alone"
_SPARSE = "its attention sees blocks, buckets or random keys"
_POSITIONS = "its relative positions have matrices of their own in attention"
_EXPERTS = "dense and MoE layers alternate, or experts differ from layer to layer"
_SHARED = "layers share their weights"
_NORMS = "it has norms inside attention or MLP that are not modelled"

REFUSED: dict[str, str] = {
    model_type: reason
    for reason, types in {
        _RECURRENT: "mamba mamba2 falcon_mamba bamba jamba zamba zamba2 nemotron_h granitemoehybrid falcon_h1 recurrent_gemma "
        "rwkv xlstm lfm2 lfm2_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text kimi_linear minimax olmo_hybrid "
        "bailing_hybrid convbert fnet",
        _TOWERS: "gemma3 gemma3n gemma4 mistral3 llama4 mllama llava llava_next paligemma qwen2_vl qwen2_5_vl qwen3_vl "
        "qwen3_vl_moe qwen2_audio internvl idefics3 smolvlm phi4_multimodal whisper clip siglip vit git fuyu moshi musicgen",
        _SPARSE: "longformer led big_bird bigbird_pegasus longt5 reformer deepseek_v32 glm_moe_dsa nystromformer yoso mra",
        _POSITIONS: "deberta deberta-v2 xlnet mpnet funnel roformer esm",
        _EXPERTS: "llama4_text switch_transformers nllb-moe jetmoe",
        _SHARED: "albert",
        _NORMS: "bitnet apertus diffllama",
        "it is two models joined; give one of them": "encoder-decoder",
    }.items()
    for model_type in types.split()
}
