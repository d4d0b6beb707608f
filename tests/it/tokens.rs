//! Token ids and masks of real tokenizers, compared with those of transformers 5.23 (`PreTrainedTokenizerFast`, which
//! is tokenizer.json unchanged), written down here.
//!
//! The models must be in the folder that `LORA_TRAIN_MODELS` names (made by `scripts/get_models.py`).

use std::path::Path;

use lora_train::data::encode::Encoder;
use lora_train::data::formats::Sample;
use lora_train::data::template::ChatTemplate;
use lora_train::data::tokenizer::Tokenizer;
use serde_json::json;

fn open(model: &str) -> Tokenizer {
    let models = std::env::var("LORA_TRAIN_MODELS").expect("LORA_TRAIN_MODELS names the folder of real models");
    Tokenizer::open(&Path::new(&models).join(model)).unwrap()
}

#[test]
#[ignore = "needs smollm2-135m in the folder LORA_TRAIN_MODELS"]
fn a_conversation_has_the_ids_of_apply_chat_template_and_loss_on_the_answers() {
    let tokenizer = open("smollm2-135m");
    let template = ChatTemplate::open("auto", &tokenizer).unwrap();
    let messages = vec![
        json!({"role": "user", "content": "What is 12+30?"}),
        json!({"role": "assistant", "content": " It is 42. \n"}),
        json!({"role": "user", "content": "Merci, très bien 😀"}),
        json!({"role": "assistant", "content": "De rien!"}),
    ];
    let encoder = Encoder {
        tokenizer: &tokenizer,
        template: template.as_ref(),
        train_on_inputs: false,
        scores: false,
        images: None,
    };
    let row = encoder.encode(&Sample::Chat { messages, tools: None }).unwrap();
    let prompt = [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
        198, 1, 4093, 198, 1780, 314, 216, 33, 34, 27, 35, 32, 47, 2, 198, 1, 520, 9531, 198,
    ];
    // ` It is 42. \n` and the end of the turn; the template's line end after it is never generated.
    let answer = [657, 314, 216, 36, 34, 30, 3717, 2];
    let second = [198, 1, 4093, 198, 31180, 605, 28, 681, 42623, 1632, 264, 40303, 218, 2, 198, 1, 520, 9531, 198];
    let second_answer = [5868, 412, 6522, 17, 2];
    let parts: [(&[u32], bool); 5] =
        [(&prompt, false), (&answer, true), (&second, false), (&second_answer, true), (&[198], false)];
    let expected: Vec<(u32, bool)> =
        parts.iter().flat_map(|(ids, loss)| ids.iter().map(move |id| (*id, *loss))).collect();
    let found: Vec<(u32, bool)> = row.ids.iter().copied().zip(row.carries_loss.iter().copied()).collect();
    assert_eq!(found, expected);
    assert_eq!(tokenizer.eos_ids(), [2]);
    assert_eq!(tokenizer.max_id(), 49151);
    // AutoTokenizer gives one sample other ids: as GPT2Tokenizer, it leaves out the `Digits` step of tokenizer.json.
    let warning = tokenizer.class_warning().unwrap();
    assert!(
        warning.contains("to 1 of 16 sample texts, such as \"ﷺ ½ ²\"") && warning.contains("\"GPT2Tokenizer\""),
        "{warning}"
    );
}

#[test]
#[ignore = "needs stories15M in the folder LORA_TRAIN_MODELS"]
fn a_text_of_the_llama_2_tokenizer_has_bos_bytes_and_eos() {
    let tokenizer = open("stories15M");
    let encoder =
        Encoder { tokenizer: &tokenizer, template: None, train_on_inputs: false, scores: false, images: None };
    let row = encoder.encode(&Sample::Text("Once upon a time, 😀 é\n there".into())).unwrap();
    assert_eq!(row.ids, [1, 9038, 2501, 263, 931, 29892, 29871, 243, 162, 155, 131, 904, 13, 727, 2]);
    assert_eq!(row.num_target_tokens(), row.ids.len() - 1);

    let mut stream = tokenizer.decode_stream(true);
    let mut text: String = row.ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    text += &stream.finish().unwrap();
    assert_eq!(text, "Once upon a time, 😀 é\n there");
    let warning = tokenizer.class_warning().unwrap();
    assert!(warning.contains("to 3 of 16 sample texts") && warning.contains("\"LlamaTokenizer\""), "{warning}");
}
