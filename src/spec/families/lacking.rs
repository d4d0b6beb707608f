//! Why models of other types are not supported.

/// Why, with how their types begin, each a word; the longest beginning counts.
pub(in crate::spec) const LACKING: &[(&str, &str)] = &[
    (
        "it needs a mixture of experts of another kind",
        "afmoe aria cohere2_moe dbrx doge dots3 flex_olmo flint glm4v_moe \
         granitemoe_swa granitemoeshared jetmoe kolibri laguna mellum mimo_v2 \
         phimoe zaya",
    ),
    (
        "it needs a mixture of experts of another kind beside latent attention",
        "deepseek hy_v4 kimi_k longcat mistral_large4",
    ),
    ("it needs a norm behind its mixtures of experts", "axk"),
    ("it needs latent attention to chosen tokens", "axk2 deepseek_v32 deepseek_v4 glm5_next glm_moe_dsa"),
    ("it reads images, and needs latent attention", "minicpm_ocr"),
    ("it needs linear attention of another kind", "kimi_linear olmo_hybrid rwkv"),
    ("it needs linear attention and a mixture of experts", "bailing_hybrid minimax qwen4_exp"),
    ("it reads images, and needs a mixture of experts of another kind", "ernie4_5_vl_moe minimax_m3_vl"),
    ("it needs recurrent layers", "recurrent_gemma xlstm"),
    ("it needs state-space layers", "bamba falcon_mamba mamba zamba"),
    ("it needs state spaces of another kind and a mixture of experts", "jamba"),
    ("it needs a gate for each head of its attention, and norms behind sublayers", "lfm3"),
    ("its parts have other names, and the rows of its projections another order", "codegen gptj"),
    ("it needs scores that fall with distance, or keys and values of one head beside its queries'", "falcon"),
    ("it needs LayerNorm of another kind", "biogpt olmo persimmon"),
    ("it needs LayerNorm and learned positions", "gpt-sw3 gpt2 gpt_bigcode gpt_neo opt"),
    ("it needs LayerNorm and scores that fall with distance", "bloom mpt"),
    ("it needs feed-forward layers without a gate, with another activation or norm", "apertus nanochat"),
    ("it needs several residual streams", "gemma3n"),
    ("it needs keys and values of another model", "gemma4_assistant gemma4_unified_assistant"),
    ("it needs cross-attention to images", "mllama"),
    ("it needs experts whose inputs are weighted, and attention to chunks", "llama4"),
    ("it needs sinks of its attention beside windows", "granite_swa"),
    ("it needs differences of attentions", "diffllama"),
    ("it needs weights of one or two bits", "bitnet"),
    ("it needs norms behind sublayers, and a factor of the logits", "hyperclovax"),
    ("it needs norms without weights and a gate of its attention", "muse"),
    ("its code and its names are its maker's own, and transformers has none", "exaone sarvam"),
    ("its answers see all of the image and the question in both directions", "paligemma"),
    (
        "it reads images; of such models only the text part is trained here, and of this one not yet",
        "aya_vision deepseek_vl ernie4_5_vl exaone4_5 glm46v granite4_vision granite_docling hunyuan_vl idefics \
         llava_next_video molmo2 phi3_v phi4_multimodal phi4mm video_llava vipllava",
    ),
    (
        "it reads sound; of such models only the text part could be trained here, and of this one not yet",
        "granite_speech qwen2_5_omni qwen2_audio qwen3_omni voxtral",
    ),
    ("it needs an encoder beside the decoder", "bart m2m_100 marian mbart mt5 pegasus t5 whisper"),
    (
        "it is an encoder, for embeddings and labels; models that write text are trained here",
        "albert bert camembert deberta distilbert electra modernbert mpnet nomic_bert roberta xlm-roberta",
    ),
];
