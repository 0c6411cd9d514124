"""Unsupported model types and the reason for each."""

import re

_RECURRENT = "it has recurrent or convolutional layers that are not modelled"
_LIGHTNING = "it has lightning attention, which is not modelled"
_SIDE_BY_SIDE = "each layer runs attention and a state space in parallel, which is not modelled"
_COMPRESSED = "compressed attention keys and hyper-connections are not modelled"
_TOWERS = "it is a multimodal model, but the file has no text_config with the language model"
_CROSS = "cross-attention to images and separate inputs of each layer are not modelled"
_SPARSE = "attention to blocks, buckets or random keys is not modelled"
_POSITIONS = "attention matrices for relative positions are not modelled"
_EXPERTS = "alternating dense and MoE layers, and experts that differ by layer, are not modelled"
_SHARED = "layers that share weights are not modelled"
_LOOPED = "layers that a token passes several times are not modelled"
_TWO = "layers with two attentions and two MLPs, and experts without compute, are not modelled"
_FACTORS = "factorized query matrices are not modelled"
_NARROW = "embeddings narrower than the layers are not modelled"
_MORE_EMBEDDINGS = (
    "embeddings other than those of tokens and positions, and language adapters, are not modelled"
)
_BOTH_SIDES = "its kind of encoder and decoder is not modelled"
_OWN_ATTENTION = "its attention or its kind of input is not modelled"
_GATED = "its gated attention, norms or scales are not modelled"
_INDEXED = "its indexer of attention keys is not modelled"
_MIXTURE = "its combination of experts with an MLP or attention is not modelled"
_ENCODER = "its norms, biases or head differ from those of supported encoders"
_NORMS = "norms inside its attention or MLP are not modelled"

REFUSED: dict[str, str] = {
    model_type: reason
    for reason, types in {
        _RECURRENT: "zamba zamba2 phi4flash recurrent_gemma rwkv xlstm lfm2 lfm2_moe convbert fnet "
        "lfm3 inkling_text inkling2_text zaya squeezebert",
        _LIGHTNING: "minimax minimax_m1 minimax_text_01 bailing_hybrid bailing_moe_linear",
        _SIDE_BY_SIDE: "falcon_h1",
        _COMPRESSED: "deepseek_v4 deepseek_ref glm5_next_text hy_v4 hy_v4_vl_text",
        _GATED: "afmoe beam dory laguna muse_glimmer_text muse_spark_text neomme",
        _INDEXED: "axk2 dots3_note_text mistral_large4_text qwen4_exp_text",
        _MIXTURE: "aria_text cohere2_moe deepseek_ocr2_text ernie4_5_vl_moe_text exaone_moe flint "
        "hunyuan_v1_moe kolibri1 lara_mini unlimited_ocr_text",
        _ENCODER: "esmc gte jina_embeddings_v3 ultrabert",
        _CROSS: "mllama_text_model gemma3n_text blip_text_model",
        _TOWERS: "gemma3 gemma3n gemma4 mistral3 llama4 mllama llava llava_next paligemma qwen2_vl "
        "qwen2_5_vl qwen3_vl "
        "qwen3_vl_moe qwen2_audio internvl idefics3 smolvlm phi4_multimodal whisper clip siglip "
        "vit git fuyu moshi musicgen blip kosmos-2 kosmos-2.5 idefics evolla emu3 chameleon pi0 "
        "florence2 "
        "pp_formulanet musicgen_melody seamless_m4t seamless_m4t_v2 pix2struct trocr "
        "vision-encoder-decoder udop perceiver",
        _SPARSE: "longformer led big_bird bigbird_pegasus longt5 reformer nystromformer yoso mra",
        _POSITIONS: "deberta deberta-v2 xlnet mpnet funnel roformer esm",
        _EXPERTS: "switch_transformers nllb-moe jetmoe",
        _SHARED: "albert",
        _LOOPED: "inkling2_loop_text ouro hrm_text",
        _TWO: "longcat_flash",
        _FACTORS: "step3_text",
        _NORMS: "axk1 bitnet apertus apertus1p5_text diffllama granite_swa granitemoe_swa "
        "kosmos_2_text_model kosmos_2_5_text_model voxtral_realtime_text",
        _NARROW: "mobilebert rembert",
        _MORE_EMBEDDINGS: "luke tapas layoutlm roc_bert xlm flaubert xmod molmo2_text",
        _BOTH_SIDES: "t5gemma t5gemma2 prophetnet pegasus_x fsmt bert-generation",
        _OWN_ATTENTION: "doge cpmant blt",
        "integer arithmetic is not modelled": "ibert",
        "alternating windows in a decoder are not modelled": "modernbert-decoder",
        "biases of attention's output alone are not modelled": "gpt_neox_japanese",
        "block diffusion is not modelled": "diffusion_gemma_text",
        "parallel attention and MLP in differing layers are not modelled": "cohere_compass_text",
        "it consists of two models; pass the config.json of one of them": "encoder-decoder",
    }.items()
    for model_type in types.split()
}
_BY_NAME = {
    re.sub("[^a-z0-9]", "", model_type.removesuffix("_text")): model_type
    for model_type, reason in REFUSED.items()
    if reason
    in (
        *(_RECURRENT, _SIDE_BY_SIDE, _COMPRESSED, _GATED, _INDEXED, _MIXTURE),
        *(_LOOPED, _TWO, _FACTORS, _NORMS),
    )
} | {"trinity": "afmoe", "hunyuana13b": "hunyuan_v1_moe"}
"""Model types by the prefix of their checkpoints' names, without punctuation."""


def refusal_of_checkpoint(name: str) -> str:
    """Return the reason why a checkpoint with this name is not supported; "" if there is no known
    reason.
    """
    tail = re.sub("[^a-z0-9]", "", name.rpartition("/")[2].casefold())
    prefixes = [beginning for beginning in _BY_NAME if tail.startswith(beginning)]
    return REFUSED[_BY_NAME[max(prefixes, key=len)]] if prefixes else ""
