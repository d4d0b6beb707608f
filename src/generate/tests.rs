use std::cell::RefCell;
use std::path::Path;

use burn::tensor::Device;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer as Inner};

use super::writing::{Next, Writing};
use super::*;
use crate::data::batch::{Batch, Document};
use crate::device::Dtype;
use crate::model::load;
use crate::model::weights::fixture::tiny_config;
use crate::model::weights::{RandomWeights, Weights};
use crate::spec::ModelConfig;

/// Special tokens that end no text, unless the config says so.
const PLAIN: [&str; 3] = ["<a>", "<b>", "<c>"];
/// The special tokens of [`CHAT`].
const TURNS: [&str; 3] = ["<s>", "</s>", "<|im_end|>"];

/// Writes a tokenizer of the 256 bytes and three special tokens.
fn write_tokenizer(folder: &Path, special: [&str; 3], config: &str) -> Tokenizer {
    let mut bytes: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    bytes.sort_unstable();
    let vocab: Vocab = (0..).zip(bytes).map(|(id, byte)| (byte.to_string(), id)).collect();
    let mut inner = Inner::new(BPE::builder().vocab_and_merges(vocab, vec![]).build().unwrap());
    inner.with_pre_tokenizer(Some(ByteLevel::new(false, true, false)));
    inner.with_decoder(Some(ByteLevel::default()));
    inner.add_special_tokens(special.map(|text| AddedToken::from(text, true))).unwrap();
    inner.save(folder.join("tokenizer.json"), false).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), config).unwrap();
    Tokenizer::open(folder).unwrap()
}

const CHAT: &str = r#"{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true, "chat_template":
"{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"}"#;

fn model(num_positions: usize) -> Model {
    model_of(num_positions, 0.3)
}

fn model_of(num_positions: usize, initializer_range: f64) -> Model {
    let config =
        ModelConfig { vocab_size: 259, initializer_range, max_position_embeddings: num_positions, ..tiny_config() };
    let weights = Weights::Random(RandomWeights::new(&config, 4));
    load::load(&config, &weights, Dtype::F32, Dtype::F32, &Device::flex()).unwrap()
}

/// The greedy continuation by full forward passes, without a cache.
fn greedy_without_cache(model: &Model, prompt_ids: &[u32], num_new: usize) -> Vec<u32> {
    let adapters = AdapterSet::none(model.blocks.len());
    let mut ids = prompt_ids.to_vec();
    for _ in 0..num_new {
        let documents = vec![Document { start: 0, len: ids.len() }];
        let batch = Batch { row_lengths: vec![ids.len()], input_ids: ids.clone(), documents, ..Batch::default() };
        let logits: Vec<f32> = model.logits(&batch, &adapters).into_data().try_to_vec().unwrap();
        let last = &logits[logits.len() - model.config.vocab_size..];
        let best = (0..).zip(last).max_by(|a: &(u32, &f32), b| a.1.total_cmp(b.1)).unwrap();
        ids.push(best.0);
    }
    ids.split_off(prompt_ids.len())
}

fn go_on(_: &str) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn greedy_text_is_that_of_full_passes_and_streams_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), PLAIN, "{}");
    let (model, adapters) = (model(256), AdapterSet::none(2));
    let generator =
        Generator { model: &model, adapters: &adapters, tokenizer: &tokenizer, stops: &Stops::of(&tokenizer, None) };
    let prompt_ids = encode_prompt(&tokenizer, None, None, "Once upon").unwrap();
    assert_eq!(prompt_ids.len(), 9);
    let streamed = RefCell::new(String::new());
    let options = GenerateOptions { max_new_tokens: 30, ..GenerateOptions::default() };
    let on_text = |text: &str| {
        streamed.borrow_mut().push_str(text);
        ControlFlow::Continue(())
    };
    let generated = generator.generate(&prompt_ids, &options, on_text).unwrap();
    assert_eq!(generated.token_ids, greedy_without_cache(&model, &prompt_ids, 30));
    assert_eq!(generated.ending, Ending::MaxNewTokens);
    assert_eq!(generated.num_decoded, 29);
    assert_eq!(streamed.into_inner(), generated.text);
}

#[test]
fn it_ends_at_the_tokenizers_eos_and_leaves_it_out() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), PLAIN, "{}");
    let (model, adapters) = (model(256), AdapterSet::none(2));
    let ids = greedy_without_cache(&model, &[5, 6], 12);
    let eos = tokenizer.token_text(ids[7]).unwrap();
    let tokenizer = write_tokenizer(folder.path(), PLAIN, &serde_json::json!({ "eos_token": eos }).to_string());
    let generator =
        Generator { model: &model, adapters: &adapters, tokenizer: &tokenizer, stops: &Stops::of(&tokenizer, None) };
    let generated = generator.generate(&[5, 6], &GenerateOptions::default(), go_on).unwrap();
    let first = ids.iter().position(|id| *id == ids[7]).unwrap();
    assert_eq!(generated.token_ids, ids[..first]);
    assert_eq!(generated.ending, Ending::EndOfText);
}

#[test]
fn positions_that_the_model_was_not_made_for_are_never_used() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), PLAIN, "{}");
    let (model, adapters) = (model(16), AdapterSet::none(2));
    let generator =
        Generator { model: &model, adapters: &adapters, tokenizer: &tokenizer, stops: &Stops::of(&tokenizer, None) };
    let generate = |prompt_ids: &[u32]| generator.generate(prompt_ids, &GenerateOptions::default(), go_on);
    // The last of 16 positions gives one more token, which needs no position.
    let generated = generate(&[1; 10]).unwrap();
    assert_eq!((generated.ending, generated.token_ids.len(), generated.num_decoded), (Ending::MaxPositions, 7, 6));
    let generated = generate(&[1; 16]).unwrap();
    assert_eq!((generated.ending, generated.token_ids.len(), generated.num_decoded), (Ending::MaxPositions, 1, 0));
    assert!(generated.tokens_per_second().is_none());
    let error = generate(&[1; 17]).unwrap_err().to_string();
    assert!(error.contains("17 tokens long") && error.contains("16 positions"), "{error}");
    assert!(matches!(generate(&[]), Err(GenerateError::EmptyPrompt)));
    assert!(matches!(generate(&[1, 259]), Err(GenerateError::UnknownToken { id: 259, vocab_size: 259 })));
}

#[test]
fn whoever_listens_can_break_off() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), TURNS, CHAT);
    let (model, adapters) = (model(256), AdapterSet::none(2));
    let generator =
        Generator { model: &model, adapters: &adapters, tokenizer: &tokenizer, stops: &Stops::of(&tokenizer, None) };
    let calls = RefCell::new(0);
    let on_text = |_: &str| {
        *calls.borrow_mut() += 1;
        if *calls.borrow() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let generated = generator.generate(&[5, 6], &GenerateOptions::default(), on_text).unwrap();
    assert_eq!((generated.ending, generated.token_ids.len()), (Ending::Stopped, 3));

    let template = ChatTemplate::open("auto", &tokenizer).unwrap();
    let prompts = ["a".to_owned(), "b".to_owned()];
    assert_eq!(generator.samples(&prompts, (template.as_ref(), None), || true).unwrap(), None);
    let texts = generator.samples(&prompts, (template.as_ref(), None), || false).unwrap().unwrap();
    assert_eq!(texts.len(), 2);
    assert_eq!(generator.samples(&prompts, (template.as_ref(), None), || false).unwrap().unwrap(), texts);
}

#[test]
fn a_prompt_is_a_users_turn_where_there_is_a_template_and_bos_is_there_once() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), TURNS, CHAT);
    let template = ChatTemplate::open("auto", &tokenizer).unwrap();
    let decoded = |template: Option<&ChatTemplate>, system| {
        let ids = encode_prompt(&tokenizer, template, system, "Hi")?;
        Ok::<_, GenerateError>(tokenizer.decode(&ids, false)?)
    };
    assert_eq!(decoded(template.as_ref(), None).unwrap(), "<s>u:Hi<|im_end|>a:");
    assert_eq!(decoded(template.as_ref(), Some("Be brief")).unwrap(), "<s>s:Be brief<|im_end|>u:Hi<|im_end|>a:");
    assert_eq!(decoded(None, None).unwrap(), "<s>Hi");
    assert!(matches!(decoded(None, Some("Be brief")), Err(GenerateError::SystemWithoutTemplate)));
    // The end of a turn ends the text, as EOS does.
    assert_eq!(tokenizer.eos_ids(), [257, 258]);
}

#[test]
fn a_text_ends_before_a_string_to_stop_at_and_never_shows_its_start() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), PLAIN, "{}");
    let letters = tokenizer.encode("say ab and abc now", false).unwrap();
    let shown = |stop: &[&str]| {
        let options = GenerateOptions { max_new_tokens: 18, ..GenerateOptions::default() };
        let stop = stop.iter().map(|&stop| stop.to_owned()).collect();
        let mut writing = Writing::new(&tokenizer, &[], &options, &[], stop, false).unwrap();
        let mut shown = Vec::new();
        for &id in &letters {
            let mut logits = vec![0.0; 259];
            logits[id as usize] = 1.0;
            let Next { text, then, .. } = writing.next(&logits, false).unwrap();
            shown.push(text);
            if let Err(ending) = then {
                assert_eq!(writing.text, shown.concat());
                return (shown, ending);
            }
        }
        panic!("the text does not end")
    };
    let (texts, ending) = shown(&["abc", "zzz"]);
    assert_eq!((texts.concat().as_str(), ending), ("say ab and ", Ending::EndOfText));
    // "ab" waits for its third letter.
    assert_eq!(texts[4..7], ["", "", "ab "]);
    assert_eq!(shown(&["w"]).0.concat(), "say ab and abc no");
    assert_eq!(shown(&["w!"]).0.concat(), "say ab and abc now");
    assert_eq!(shown(&["and", "ab"]).0.concat(), "say ");
    assert_eq!(
        shown(&[]),
        (letters.iter().map(|id| tokenizer.decode(&[*id], true).unwrap()).collect(), Ending::MaxNewTokens)
    );
}

#[test]
fn the_bytes_of_the_tokens_are_the_text_that_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), PLAIN, "{}");
    let bytes = |ids: &[u32], stop: &[&str]| {
        let options = GenerateOptions { max_new_tokens: ids.len(), ..GenerateOptions::default() };
        let stop = stop.iter().map(|&stop| stop.to_owned()).collect();
        let mut writing = Writing::new(&tokenizer, &[], &options, &[], stop, false).unwrap();
        let mut tokens: Vec<Vec<u8>> = Vec::new();
        for &id in ids {
            let mut logits = vec![0.0; 259];
            logits[id as usize] = 1.0;
            let Next { shown, then, .. } = writing.next(&logits, false).unwrap();
            tokens.extend(shown);
            assert!(tokens.concat().len() <= writing.text.len());
            if then.is_err() {
                break;
            }
        }
        (tokens, writing.text)
    };
    let ids = tokenizer.encode("é <b>🦀ab ac", false).unwrap();
    let (tokens, text) = bytes(&ids, &[]);
    assert_eq!((tokens.len(), text.as_str()), (ids.len(), "é 🦀ab ac"));
    assert_eq!((tokens.concat(), &tokens[3]), (text.into_bytes(), &Vec::new()));
    let (tokens, text) = bytes(&ids, &["b ac"]);
    assert_eq!((tokens.concat(), text.as_str()), (text.clone().into_bytes(), "é 🦀a"));
    // Half a character: the token has its byte, and the text what stands for it.
    let (tokens, text) = bytes(&ids[..1], &[]);
    assert_eq!((tokens.concat(), text.as_str()), ("\u{fffd}".as_bytes().to_vec(), "\u{fffd}"));
}

#[test]
fn a_text_that_is_held_to_a_schema_is_json_of_it_whatever_the_model_would_write() {
    let folder = tempfile::tempdir().unwrap();
    let properties = serde_json::json!({"name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["é", "b"]}});
    let schema = serde_json::json!({"type": "object", "properties": properties, "required": ["name", "kind"],
        "additionalProperties": false});
    let (model, adapters) = (model(256), AdapterSet::none(2));
    // With and without a token that ends texts.
    for config in ["{}", r#"{"eos_token": "<b>"}"#] {
        let tokenizer = write_tokenizer(folder.path(), PLAIN, config);
        let (grammars, stops) = (Grammars::new(&tokenizer, 259).unwrap(), Stops::of(&tokenizer, None));
        let write = |schema: &Value, temperature: f64, seed: u64| {
            let options = GenerateOptions { temperature, seed, ..GenerateOptions::default() };
            let grammar = Some(grammars.of_schema(schema).unwrap());
            let request = TextRequest { grammar, ..TextRequest::new(vec![5, 6], &adapters, options, &stops) };
            let mut batch = TextBatch::new(&model, &tokenizer);
            let (mut text, mut ending) = (String::new(), None);
            let mut take = |_: u64, new: NewText| {
                text.push_str(&new.text);
                ending = new.ending;
                ControlFlow::Continue(())
            };
            batch.add(0, request, &mut take).unwrap();
            while !batch.is_empty() {
                batch.step(&mut take).unwrap();
            }
            assert_eq!(ending, Some(Ending::EndOfText), "{text}");
            serde_json::from_str::<Value>(&text).unwrap()
        };
        for (temperature, seed) in [(0.0, 0), (1.0, 1), (2.0, 2)] {
            let found = write(&schema, temperature, seed);
            assert!(found["name"].as_str().unwrap().chars().count() <= 5, "{found}");
            assert!(found["kind"] == "é" || found["kind"] == "b", "{found}");
        }
        let number = write(&serde_json::json!({"type": "integer", "minimum": 10, "maximum": 12}), 1.0, 3);
        assert!((10..=12).contains(&number.as_i64().unwrap()), "{number}");
        let error = grammars.of_schema(&serde_json::json!({"type": "string", "format": "nonsense"})).unwrap_err();
        assert!(error.to_string().contains("nonsense"), "{error}");
    }
}

#[test]
fn what_ends_a_turn_ends_json_that_is_complete_and_is_never_within_it() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), PLAIN, "{}");
    let grammars = Grammars::new(&tokenizer, 259).unwrap();
    // A letter is also text, as is a token that is not marked as special.
    let ends = tokenizer.encode("b<c>", false).unwrap();
    let where_it_may_end = |schema: Value, text: &str| {
        let mut grammar = grammars.of_schema(&schema).unwrap();
        let may_end = |grammar: &mut Grammar| {
            let mask = grammar.mask(&[0.0; 259], &ends).unwrap().unwrap();
            let may = ends.iter().map(|end| mask[*end as usize] == 0.0).collect::<Vec<_>>();
            assert_eq!(may[0], may[1], "{text}");
            may[0]
        };
        let before = may_end(&mut grammar);
        let tokens = tokenizer.encode(text, false).unwrap().into_iter();
        let behind = tokens.map(|token| grammar.take(token).is_ok() && may_end(&mut grammar));
        std::iter::once(before).chain(behind).collect::<Vec<_>>()
    };
    assert_eq!(where_it_may_end(serde_json::json!({"type": "string"}), "\"a\""), [false, false, false, true]);
    assert_eq!(where_it_may_end(serde_json::json!({"type": "integer"}), "-12"), [false, false, true, true]);
}

#[test]
fn texts_that_are_written_together_are_those_written_alone() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), PLAIN, "{}");
    let (model, adapters, others) = (model(64), AdapterSet::none(2), AdapterSet::none(2));
    let prompt = |index: u64| {
        let own = vec![u32::try_from(index * 7).unwrap(); 1 + usize::try_from(index % 3).unwrap()];
        [vec![3, 4], own].concat()
    };
    let options = |index: u64| GenerateOptions {
        max_new_tokens: 5 + usize::try_from(3 * index).unwrap(),
        temperature: if index.is_multiple_of(2) { 0.0 } else { 0.9 },
        seed: index,
        ..GenerateOptions::default()
    };
    let generator =
        Generator { model: &model, adapters: &adapters, tokenizer: &tokenizer, stops: &Stops::of(&tokenizer, None) };
    let endless = Stops::default();
    let batches = [TextBatch::new(&model, &tokenizer), TextBatch::new(&model, &tokenizer).of_equal_starts()];
    for mut batch in batches {
        let mut texts = vec![(String::new(), None); 7];
        let mut on_text = |id: u64, new: NewText| {
            let (text, ending) = &mut texts[usize::try_from(id).unwrap()];
            text.push_str(&new.text);
            *ending = new.ending;
            ControlFlow::Continue(())
        };
        for id in 0..7 {
            let adapters = if id % 3 == 0 { &others } else { &adapters };
            let (prompt_ids, options) = (prompt(id), options(id));
            batch.add(id, TextRequest::new(prompt_ids, adapters, options, &endless), &mut on_text).unwrap();
            batch.step(&mut on_text).unwrap();
        }
        while !batch.is_empty() {
            batch.step(&mut on_text).unwrap();
        }
        for (id, text) in (0..).zip(texts) {
            let alone = generator.generate(&prompt(id), &options(id), go_on).unwrap();
            assert_eq!(text, (alone.text, Some(alone.ending)), "{id}");
        }
    }
}

#[test]
fn a_text_goes_on_from_what_the_model_has_seen_as_one_that_begins_with_all_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), PLAIN, "{}");
    let (model, adapters, stops) = (model(256), AdapterSet::none(2), Stops::of(&tokenizer, None));
    let options = GenerateOptions { max_new_tokens: 3, ..GenerateOptions::default() };
    let request = |ids: &[u32]| TextRequest::new(ids.to_vec(), &adapters, options, &stops);
    let mut texts = TextBatch::new(&model, &tokenizer).of_equal_starts().of_turns();
    let mut ids = vec![vec![5, 6, 7, 8], vec![5, 6, 7, 8], vec![5, 6]];
    let mut seen = vec![None, None, None];
    for turn in 0..2 {
        let before = ids.clone();
        let written = RefCell::new(vec![Vec::new(); 3]);
        let at = |id: u64| usize::try_from(id).unwrap();
        let on_text = |id: u64, new: NewText| {
            written.borrow_mut()[at(id)].extend(new.token);
            ControlFlow::Continue(())
        };
        for (id, (ids, seen)) in (0..).zip(ids.iter().zip(&mut seen)) {
            texts.go_on(id, request(ids), seen.take(), on_text).unwrap();
        }
        while !texts.is_empty() {
            texts.step(on_text).unwrap();
        }
        for (id, sequence) in texts.take_ended() {
            // All but the last token that was written.
            assert_eq!(sequence.num_tokens(), ids[at(id)].len() + 2);
            seen[at(id)] = Some(sequence);
        }
        for ((ids, before), written) in ids.iter_mut().zip(&before).zip(written.into_inner()) {
            assert_eq!(written, greedy_without_cache(&model, before, 3), "turn {turn}");
            ids.extend(written);
            // A reply.
            ids.extend([9, 10, turn]);
        }
    }
}

#[test]
fn guessed_tokens_are_taken_where_they_are_drawn_and_the_text_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = write_tokenizer(folder.path(), PLAIN, "{}");
    // Blocks that add next to nothing: what follows a token depends on it alone, and comes again.
    let (model, adapters, endless) = (model_of(256, 0.002), AdapterSet::none(2), Stops::default());
    let prompt = [1, 2, 3, 4, 5, 6];
    // The tokens of one text beside others, how many the model has seen of it, and in how many passes.
    let write = |num_others: u64, temperature: f64, max_new_tokens: usize, prompt: &[u32], stops: &Stops| {
        let (mut batch, mut passes) = (TextBatch::new(&model, &tokenizer).of_turns(), 0);
        let tokens = RefCell::new(Vec::new());
        let on_text = |id: u64, new: NewText| {
            tokens.borrow_mut().extend(new.token.filter(|_| id == 0));
            ControlFlow::Continue(())
        };
        for id in 0..=num_others {
            let options = GenerateOptions { max_new_tokens, temperature, seed: 7 + id, ..GenerateOptions::default() };
            let request = TextRequest::new(prompt.to_vec(), &adapters, options, stops);
            batch.add(id, request, on_text).unwrap();
        }
        while !batch.is_empty() {
            batch.step(on_text).unwrap();
            passes += 1;
        }
        let seen = batch.take_ended().into_iter().find(|(id, _)| *id == 0).unwrap().1.num_tokens();
        (tokens.into_inner(), seen, passes)
    };
    for temperature in [0.0, 0.002] {
        for max_new_tokens in [100, 244, 300] {
            let (alone, seen, passes) = write(0, temperature, max_new_tokens, &prompt, &endless);
            // With so many others nothing is guessed.
            let (beside, seen_beside, passes_beside) = write(8, temperature, max_new_tokens, &prompt, &endless);
            assert_eq!(alone, beside);
            assert_eq!((seen, seen), (seen_beside, prompt.len() + alone.len() - 1));
            assert_eq!(passes_beside, alone.len() - 1);
            assert!(passes < passes_beside, "{passes} of {passes_beside} passes at {temperature}");
            let (among, seen_among, _) = write(3, temperature, max_new_tokens, &prompt, &endless);
            assert_eq!((among, seen_among), (alone, seen));
        }
    }
    // A text that has stood in its prompt, and ends within what is guessed.
    let (again, ..) = write(0, 0.0, 60, &prompt, &endless);
    let prompt = [&prompt[..], &again].concat();
    let (whole, ..) = write(8, 0.0, 12, &prompt, &endless);
    for at in 1..12 {
        let stops = Stops { ids: vec![whole[at]], texts: Vec::new() };
        let num_tokens = whole.iter().position(|token| *token == whole[at]).unwrap();
        let (tokens, seen, _) = write(0, 0.0, 12, &prompt, &stops);
        assert_eq!((&tokens[..], seen), (&whole[..num_tokens], prompt.len() + num_tokens));
    }
}
