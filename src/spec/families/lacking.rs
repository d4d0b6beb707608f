//! Why models of other types are not supported.

/// Why, with how their types begin, each a word; the longest beginning counts.
pub(in crate::spec) const LACKING: &[(&str, &str)] = &[
    (
        "it needs a mixture of experts of another kind",
        "afmoe aria cohere2_moe dbrx deepseek doge dots3 jetmoe kolibri laguna mimo_v2 phimoe zaya",
    ),
    ("it needs a mixture of experts of another kind beside latent attention", "hy_v4 longcat mistral_large4"),
    ("it needs a gate for each head of its attention beside a mixture of experts", "step3p"),
    ("it needs a gate of its attention, and residuals scaled by their depth", "beam"),
    ("it needs a norm behind its mixtures of experts", "axk"),
    ("it needs latent attention to chosen tokens", "axk2 deepseek_v32 deepseek_v4 glm5_next glm_moe_dsa"),
    ("it reads images, and needs DeepSeek's mixture of experts without latent attention", "deepseek_ocr unlimited_ocr"),
    ("it needs scores of relative positions", "cpmant inkling"),
    ("it needs attention by hashes, or in another order of words", "reformer xlnet"),
    ("it goes through its layers several times", "hrm_text"),
    ("it reads bytes in patches", "blt"),
    ("it adds biases of its own behind attention", "gpt_neox_japanese"),
    ("it writes images, sound or movements", "chameleon cosmos3_omni diffusion_gemma emu3 moshi musicgen pi0"),
    ("it needs linear attention of another kind", "kimi_linear olmo_hybrid rwkv"),
    ("it needs linear attention of another kind and a mixture of experts", "bailing_hybrid minimax qwen4_exp"),
    ("it reads images, and needs a mixture of experts of another kind", "ernie4_5_vl_moe minimax_m3_vl"),
    ("it needs recurrent layers", "recurrent_gemma xlstm"),
    ("it needs state spaces of another kind", "falcon_mamba mamba zamba"),
    ("its state spaces stand in blocks of another kind", "mamba2"),
    ("it needs state spaces of another kind and a mixture of experts", "jamba"),
    ("it needs a gate for each head of its attention, and norms behind sublayers", "lfm3"),
    ("its parts have other names, and the rows of its projections another order", "codegen gptj"),
    ("it needs scores that fall with distance, or keys and values of one head beside its queries'", "falcon"),
    ("it needs LayerNorm of another kind", "biogpt olmo persimmon"),
    (
        "it needs LayerNorm, and positions added to its embeddings",
        "ctrl gpt-sw3 gpt2 gpt_bigcode gpt_neo openai-gpt opt xglm xlm",
    ),
    ("it needs LayerNorm and scores that fall with distance", "bloom mpt"),
    ("it needs feed-forward layers without a gate, and norms without a weight", "nanochat"),
    ("it needs keys and values of another model", "gemma4_assistant gemma4_unified_assistant"),
    ("it needs cross-attention to images; its language model is Llama 3.1's, which is trained here", "mllama"),
    ("it needs differences of attentions", "diffllama"),
    ("it needs weights of one or two bits", "bitnet"),
    ("it needs a mixture of experts, and gates of its residual stream", "muse_spark"),
    ("its files have names of their own", "sarvam"),
    ("its answers see all of the image and the question in both directions", "paligemma"),
    (
        "it reads images; of such models only the text part is trained here, and of this one not yet",
        "aya_vision blip cohere2_vision cohere_compass cosmos3_edge deepseek_vl ernie4_5_vl exaone4_5 fast_vlm fuyu git got_ocr granite4_vision \
         granite_docling hunyuan_vl idefics instructblip janus kosmos llava_next_video minicpm_ocr minicpmv molmo2 \
         nemotron_h_omni perception_lm phi3_v phi4_multimodal phi4mm pp_chart2table qianfan_ocr video_llama video_llava vipllava",
    ),
    (
        "it reads sound; of such models only the text part could be trained here, and of this one not yet",
        "granite_speech moss_transcribe qwen2_5_omni qwen2_audio qwen3_omni voxtral",
    ),
    (
        "it needs an encoder beside the decoder",
        "bart bigbird_pegasus blenderbot evolla florence2 m2m_100 marian mbart mt5 mvp pegasus pix2struct plbart \
         pp_formulanet prophetnet t5 trocr udop vision-encoder-decoder whisper",
    ),
    (
        "it is an encoder, for embeddings and labels; models that write text are trained here",
        "albert bert big_bird camembert data2vec deberta distilbert electra megatron-bert modernbert mpnet nomic_bert \
         rembert roberta roc_bert roformer xlm-roberta xmod",
    ),
];
