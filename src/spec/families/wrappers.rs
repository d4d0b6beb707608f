//! Models around a language model.

use crate::spec::family::Wrapper;

const fn wrapper(model_type: &'static str, architecture: &'static str, text: &'static str) -> Wrapper {
    Wrapper { model_type, architecture, text, nesting: "model.language_model." }
}

const fn text_model(model_type: &'static str, architecture: &'static str) -> Wrapper {
    Wrapper { nesting: "model.text_model.", ..wrapper(model_type, architecture, "llama") }
}

/// Those whose language model is trained.
pub(in crate::spec) const WRAPPERS: &[Wrapper] = &[
    wrapper("mistral3", "Mistral3ForConditionalGeneration", "mistral"),
    wrapper("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
    wrapper("gemma3n", "Gemma3nForConditionalGeneration", "gemma3n_text"),
    wrapper("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text"),
    wrapper("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text"),
    wrapper("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
    wrapper("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    wrapper("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    wrapper("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
    wrapper("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    wrapper("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    wrapper("glm4v", "Glm4vForConditionalGeneration", "glm4v_text"),
    wrapper("glm46v", "Glm46VForConditionalGeneration", "glm4v_text"),
    wrapper("glm4v_moe", "Glm4vMoeForConditionalGeneration", "glm4v_moe_text"),
    wrapper("glm_ocr", "GlmOcrForConditionalGeneration", "glm_ocr_text"),
    wrapper("internvl", "InternVLForConditionalGeneration", "qwen2"),
    wrapper("llava", "LlavaForConditionalGeneration", "llama"),
    wrapper("llava_next", "LlavaNextForConditionalGeneration", "llama"),
    wrapper("llava_onevision", "LlavaOnevisionForConditionalGeneration", "qwen2"),
    wrapper("lfm2_vl", "Lfm2VlForConditionalGeneration", "lfm2"),
    wrapper("lighton_ocr", "LightOnOcrForConditionalGeneration", "qwen3"),
    wrapper("muse_glimmer", "MuseGlimmerForConditionalGeneration", "muse_glimmer_text"),
    wrapper("ovis2", "Ovis2ForConditionalGeneration", "qwen2"),
    wrapper("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", "paddleocr_vl_text"),
    Wrapper { nesting: "language_model.model.", ..wrapper("llama4", "Llama4ForConditionalGeneration", "llama4_text") },
    text_model("idefics3", "Idefics3ForConditionalGeneration"),
    text_model("smolvlm", "SmolVLMForConditionalGeneration"),
];
