"""Unsupported types of config.json, with the reason."""

_RECURRENT = "its layers are recurrent or convolutional in a way that is not modelled"
_LIGHTNING = "its layers are of lightning attention, which is not modelled"
_SIDE_BY_SIDE = "attention and a state space stand side by side in a layer"
_COMPRESSED = (
    "its attention sees keys that are compressed, and its layers are joined by hyper-connections"
)
_TOWERS = (
    "it joins a language model with vision or audio towers, and the file has no text_config to read"
)
_CROSS = "layers of cross-attention to images stand between its own, or inputs by layer"
_SPARSE = "its attention sees blocks, buckets or random keys"
_POSITIONS = "its relative positions have matrices of their own in attention"
_EXPERTS = "dense and MoE layers alternate, or experts differ from layer to layer"
_SHARED = "layers share their weights"
_LOOPED = "a token passes some of its layers several times"
_TWO = "a layer has two attentions and two MLPs, and experts that do nothing"
_FACTORS = "its attention's queries are products of factors"
_NARROW = "its embeddings are narrower than its layers"
_MORE_EMBEDDINGS = "it embeds more than tokens and positions, or has adapters for languages"
_BOTH_SIDES = "its encoder and decoder are of a kind that is not modelled"
_OWN_ATTENTION = "its attention, or what it takes for tokens, is of a kind that is not modelled"
_NORMS = "it has norms inside attention or MLP that are not modelled"

REFUSED: dict[str, str] = {
    model_type: reason
    for reason, types in {
        _RECURRENT: "zamba zamba2 phi4flash recurrent_gemma rwkv xlstm lfm2 lfm2_moe convbert fnet "
        "lfm3 inkling_text inkling2_text zaya squeezebert",
        _LIGHTNING: "minimax minimax_m1 minimax_text_01 bailing_hybrid bailing_moe_linear",
        _SIDE_BY_SIDE: "falcon_h1",
        _COMPRESSED: "deepseek_v4 deepseek_ref glm5_next_text hy_v4",
        _CROSS: "mllama_text_model gemma3n_text",
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
        _NORMS: "axk1 bitnet apertus apertus1p5_text diffllama granite_swa granitemoe_swa",
        _NARROW: "mobilebert rembert",
        _MORE_EMBEDDINGS: "luke tapas layoutlm roc_bert xlm flaubert xmod",
        _BOTH_SIDES: "t5gemma t5gemma2 prophetnet pegasus_x fsmt bert-generation",
        _OWN_ATTENTION: "doge cpmant blt",
        "it is two models joined; give one of them": "encoder-decoder",
    }.items()
    for model_type in types.split()
}
