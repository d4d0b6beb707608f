use serde_json::{Value, json};

use super::*;
use crate::data::encode::Encoder;
use crate::data::fixture::{BOS, EOS, IM_END, model_folder, tokenizer};
use crate::data::formats::{Prompt, Sample};

fn open(config: &Value, files: &[(&str, Value)]) -> Result<Tokenizer, TokenizerError> {
    let folder = model_folder(config);
    for (name, content) in files {
        let text = content.as_str().map_or_else(|| content.to_string(), str::to_owned);
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    Tokenizer::open(folder.path())
}

#[test]
fn special_tokens_are_read_in_every_spelling_and_from_every_file() {
    let tokenizer = open(
        &json!({"bos_token": {"content": "<s>", "lstrip": false}, "pad_token": null}),
        &[
            ("special_tokens_map.json", json!({"unk_token": {"content": "!"}})),
            ("generation_config.json", json!({"eos_token_id": [7, 8]})),
            ("config.json", json!({"eos_token_id": 257, "bos_token_id": 257})),
        ],
    )
    .unwrap();
    assert_eq!(tokenizer.bos().unwrap().id, BOS);
    assert_eq!(tokenizer.unk().unwrap().text, "!");
    assert_eq!(tokenizer.eos().unwrap(), &SpecialToken { text: "</s>".into(), id: EOS });
    assert!(tokenizer.pad().is_none());
    assert_eq!(tokenizer.eos_ids(), [7, 8, EOS, IM_END]);
}

#[test]
fn of_two_files_that_name_a_token_that_counts_which_counts_in_transformers() {
    let bos = |config: Value| {
        let map = [("special_tokens_map.json", json!({"bos_token": "</s>", "cls_token": "<s>"}))];
        open(&config, &map).unwrap().bos().unwrap().text.clone()
    };
    assert_eq!(bos(json!({"bos_token": "<s>"})), "</s>");
    let new = json!({"bos_token": "<s>", "added_tokens_decoder": {}});
    assert_eq!(bos(new.clone()), "<s>");
    let map = json!({"cls_token": "<s>", "additional_special_tokens": ["<a>"]});
    let tokenizer = open(&new, &[("special_tokens_map.json", map)]).unwrap();
    assert!(!tokenizer.named_tokens().contains_key("cls_token") && tokenizer.max_id() == 260);
    let both = json!({"extra_special_tokens": ["<a>"], "additional_special_tokens": ["<b>"]});
    assert_eq!(open(&both, &[]).unwrap().encode("<a><b>", false).unwrap(), [261, 60, 98, 62]);
}

#[test]
fn special_tokens_have_the_names_that_the_files_give_them() {
    let config = json!({"eos_token": "</s>", "sep_token": {"content": "<s>"}, "image_token": "<|im_start|>", "add_bos_token": true,
                        "mask_token": null, "extra_special_tokens": {"turn_token": "<|im_end|>", "boi": "!"}});
    let tokenizer = open(&config, &[("special_tokens_map.json", json!({"cls_token": "#"}))]).unwrap();
    let named: Vec<_> = tokenizer.named_tokens().iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let expected = [
        ("boi", "!"),
        ("cls_token", "#"),
        ("eos_token", "</s>"),
        ("image_token", "<|im_start|>"),
        ("sep_token", "<s>"),
        ("turn_token", "<|im_end|>"),
    ];
    assert_eq!(named, expected);
    assert!(tokenizer.special_texts().contains(&"#".to_owned()), "what has a name is special");
}

#[test]
fn tokens_are_added_by_the_files_beside_as_transformers_adds_them() {
    let token = |text: &str, special: bool| json!({"content": text, "special": special, "normalized": false});
    let ids =
        |config: Value, files: &[(&str, Value)], text: &str| open(&config, files).unwrap().encode(text, false).unwrap();
    let decoder = json!({"added_tokens_decoder": {"270": token("<note>", true), "261": token("<think>", false)}});
    // Their ids follow those that there are, in the order of the numbers.
    assert_eq!(ids(decoder.clone(), &[], "<think>x<note>"), [261, 120, 262]);
    assert_eq!(open(&decoder, &[]).unwrap().special_texts().iter().filter(|text| *text == "<note>").count(), 1);
    let file = [("added_tokens.json", json!({"<think>": 261, "<s>": BOS}))];
    assert_eq!(ids(json!({}), &file, "<think><s>"), [261, BOS]);
    assert_eq!(ids(decoder.clone(), &file, "<think><s>"), [261, BOS]);
    for key in ["extra_special_tokens", "additional_special_tokens"] {
        assert_eq!(ids(json!({key: ["<a>", {"content": "<b>"}]}), &[], "<a><b>"), [261, 262], "{key}");
    }
    let extra = json!({"z_token": "<note>", "a_token": {"content": "<tool>", "lstrip": true}});
    assert_eq!(
        ids(json!({"extra_special_tokens": extra}), &[], "<note>x  <tool>"),
        [261, 120, 262],
        "as the file has them"
    );
    // The flags of the configuration go before those of tokenizer.json.
    let strips = json!({"added_tokens_decoder": {"257": {"content": "</s>", "special": true, "rstrip": true}}});
    assert_eq!(ids(strips, &[], "</s>  x"), [EOS, 120]);
    let end = json!({"eos_token": "<end>", "added_tokens_decoder": {"261": token("<end>", false)}});
    assert_eq!(open(&end, &[]).unwrap().eos().unwrap().id, 261);
}

#[test]
fn an_id_far_beyond_the_model_is_refused_at_once() {
    let folder = model_folder(&json!({}));
    let text = std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    let text = text.replace("\"ab\":260", "\"ab\":2147483648");
    let tokenizer = open(&json!({}), &[("tokenizer.json", text.into())]).unwrap();
    let error = tokenizer.for_rows(300).unwrap_err().to_string();
    assert!(error.contains("token 2147483648 (\"ab\") is beyond the 300 tokens of config.json"), "{error}");
}

#[test]
fn added_tokens_of_great_length_are_refused_at_once() {
    let long = |i: usize| format!("t{i}").repeat(200);
    let tokens: serde_json::Map<String, Value> = (300..3300).map(|i| (long(i), json!(i))).collect();
    let error = open(&json!({}), &[("added_tokens.json", tokens.into())]).unwrap_err().to_string();
    assert!(error.contains("its added tokens have 2") && error.contains("at most 4000000 and 256000"), "{error}");
    let tokens: Vec<Value> = (0..3000).map(|i| json!({"content": long(i)})).collect();
    let error = open(&json!({}), &[("tokenizer.json", json!({"added_tokens": tokens}))]).unwrap_err().to_string();
    assert!(error.contains("its added tokens have 2"), "{error}");
}

#[test]
fn generation_does_not_stop_at_the_end_of_a_thought_of_gpt_oss() {
    let ends = |eos: &str| {
        let config = json!({"eos_token": eos});
        let folder = model_folder(&config);
        let text = std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
        let text = text.replace("<|im_end|>", "<|end|>").replace("</s>", eos);
        let tokenizer = open(&config, &[("tokenizer.json", text.into())]).unwrap();
        assert!(tokenizer.turn_ends().contains(&"<|end|>".to_owned()));
        tokenizer.eos_ids().to_vec()
    };
    assert_eq!(ends("</s>"), [EOS, IM_END]);
    assert_eq!(ends("<|return|>"), [EOS]);
}

#[test]
fn a_special_token_that_no_vocabulary_has_is_added_and_needs_a_row() {
    let named = |key: &str| open(&json!({key: "<new>"}), &[]).unwrap();
    assert_eq!(named("eos_token").eos().unwrap().id, 261);
    assert_eq!(named("bos_token").for_rows(262).unwrap().bos().unwrap().id, 261);
    let error = named("eos_token").for_rows(261).unwrap_err().to_string();
    assert!(
        error.contains("no row for \"<new>\", token 261\n  hint: `lora.trainable_token_indices` = [261]"),
        "{error}"
    );
    // Only a text that has it needs its row.
    let padded = named("pad_token").for_rows(261).unwrap();
    assert_eq!(padded.encode("x", false).unwrap(), [120]);
    assert!(padded.encode("<new>", false).is_err());
    let empty = tempfile::TempDir::new().unwrap();
    assert!(Tokenizer::open(empty.path()).unwrap_err().to_string().contains(": no tokenizer.json\n  hint: "));
}

#[test]
fn bos_is_added_as_the_configuration_says_and_truncation_and_padding_are_not_used() {
    let ids = |config: Value| open(&config, &[]).unwrap().encode("abcdefgh", true).unwrap();
    assert_eq!(ids(json!({"bos_token": "<s>"})), [BOS, 260, 99, 100, 101, 102, 103, 104]);
    assert_eq!(ids(json!({"bos_token": "<s>", "add_bos_token": false})).len(), 7);
    let other = json!({"bos_token": "</s>", "add_bos_token": true});
    assert_eq!(ids(other)[..2], [EOS, BOS], "what tokenizer.json puts in front is no BOS here, so it stays");
    assert_eq!(tokenizer().encode("abcdefgh", false).unwrap().len(), 7);
}

#[test]
fn a_post_processor_that_ends_texts_ends_no_prompt_and_a_row_once() {
    let config = json!({"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": true});
    let folder = model_folder(&config);
    let text = std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let processor = &mut json["post_processor"];
    processor["single"].as_array_mut().unwrap().push(json!({"SpecialToken": {"id": "</s>", "type_id": 0}}));
    processor["special_tokens"]["</s>"] = json!({"id": "</s>", "ids": [EOS], "tokens": ["</s>"]});
    let tokenizer = open(&config, &[("tokenizer.json", json)]).unwrap();
    assert_eq!(tokenizer.inner.encode("x", true).unwrap().get_ids(), [BOS, 120, EOS]);
    assert_eq!(tokenizer.encode("x", true).unwrap(), [BOS, 120]);
    assert_eq!(tokenizer.encode("", true).unwrap(), [BOS]);
    // What the text itself has stays.
    assert_eq!(tokenizer.encode("x</s>", true).unwrap(), [BOS, 120, EOS]);
    let encoder =
        Encoder { tokenizer: &tokenizer, template: None, train_on_inputs: false, scores: false, images: None };
    let ids = |sample: Sample| encoder.encode(&sample).unwrap().ids;
    for text in ["x", "x</s>", "<s>x"] {
        assert_eq!(ids(Sample::Text(text.into())), [BOS, 120, EOS], "{text}");
    }
    assert_eq!(ids(Sample::Completion { prompt: "x".into(), completion: "y</s>".into() }), [BOS, 120, 121, EOS]);
    assert_eq!(ids(Sample::Prompt(Prompt::Text("xy".into()))), [BOS, 120, 121]);
}

#[test]
fn tokens_know_their_bytes() {
    let tokens = tokenizer().encode_tokens("é</s>ab", true).unwrap();
    let bytes: Vec<_> = tokens.iter().map(|token| (token.id, token.start, token.end)).collect();
    // Each half of é has the byte range of the whole character.
    assert_eq!(bytes, [(BOS, 0, 0), (0xc3, 0, 2), (0xa9, 0, 2), (EOS, 2, 6), (260, 6, 8)]);
}

#[test]
fn tokens_know_what_they_add_to_a_text() {
    let tokenizer = tokenizer();
    let of_text = |text: &str| {
        let ids = tokenizer.encode(text, false).unwrap();
        ids.into_iter().map(|id| tokenizer.bytes_in_text(id)).collect::<Vec<_>>()
    };
    assert_eq!(of_text("ab é</s>"), [&b"ab"[..], b" ", b"\xc3", b"\xa9", b""]);
    assert_eq!(tokenizer.longest_token(), "<|im_start|>".len());
    let all: Vec<Vec<u8>> = (0..=255).map(|id| tokenizer.bytes_in_text(id)).collect();
    assert_eq!(all, (0..=255).map(|byte| vec![byte]).collect::<Vec<_>>());
}

#[test]
fn ids_beyond_a_models_vocabulary_can_be_seen() {
    assert_eq!(tokenizer().max_id(), 260);
}

#[test]
fn a_stream_gives_whole_characters() {
    let tokenizer = tokenizer();
    let text = "aé 😀 ab";
    let mut stream = tokenizer.decode_stream(true);
    let mut parts = Vec::new();
    for id in tokenizer.encode(text, true).unwrap() {
        parts.push(stream.push(id).unwrap());
    }
    assert_eq!(parts.concat(), text);
    assert_eq!(parts, ["", "a", "", "é", " ", "", "", "", "😀", " ", "ab"]);
    stream.push(0xf0).unwrap();
    assert_eq!(stream.finish().unwrap(), "\u{fffd}");
    assert_eq!(stream.finish().unwrap(), "");
}

#[test]
fn the_template_file_goes_before_the_configuration() {
    let named = json!({"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]});
    assert_eq!(open(&named, &[]).unwrap().chat_template(), Some("D"));
    let file = [("chat_template.jinja", json!("F"))];
    assert_eq!(open(&named, &file).unwrap().chat_template(), Some("F"));
    // Files of the processor.
    let [legacy, older] =
        ["chat_template.json", "processor_config.json"].map(|name| (name, json!({"chat_template": name})));
    for (files, expected) in [
        (&[file[0].clone(), legacy.clone()][..], "F"),
        (&[older.clone(), legacy][..], "chat_template.json"),
        (&[older, ("chat_template.json", json!({}))][..], "processor_config.json"),
        (&[("processor_config.json", json!({"image_seq_len": 64}))][..], "D"),
    ] {
        assert_eq!(open(&named, files).unwrap().chat_template(), Some(expected));
    }
    assert_eq!(open(&json!({}), &[]).unwrap().chat_template(), None);
    let with_tools = |files: &[(&str, Value)]| open(&named, files).unwrap().tool_template().map(ToOwned::to_owned);
    assert_eq!((with_tools(&[]).as_deref(), with_tools(&file)), (Some("T"), None));
    let folder = model_folder(&named);
    std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
    std::fs::write(folder.path().join("additional_chat_templates/tool_use.jinja"), "U").unwrap();
    let tokenizer = Tokenizer::open(folder.path()).unwrap();
    assert_eq!((tokenizer.chat_template(), tokenizer.tool_template()), (Some("D"), Some("U")));
    let of_names = open(&json!({"chat_template": {"default": "D", "tool_use": "T"}}), &[]).unwrap();
    assert_eq!((of_names.chat_template(), of_names.tool_template()), (Some("D"), Some("T")));
}

/// The library reads these parts twice, and unwraps on the second read.
#[test]
fn a_tokenizer_that_is_no_json_deep_inside_is_refused() {
    for decoder in ["{1: 2}", "{\"type\": \"Strip\", 7}", "{\"type\": \"ByteFallback\""] {
        let text = format!("{{\"version\": \"1.0\", \"decoder\": {decoder}, \"model\": {{\"type\": \"BPE\"}}}}");
        let error = open(&json!({}), &[("tokenizer.json", json!(text))]).unwrap_err();
        assert!(error.to_string().contains("/tokenizer.json: "), "{decoder}: {error}");
    }
}
