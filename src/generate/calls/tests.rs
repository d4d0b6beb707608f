use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::IteratorRandom as _;

use super::*;
use crate::data::fixture::chat_tokenizer;
use crate::generate::{Grammar, Grammars};

/// A template that writes a turn's calls as `calls` does.
fn form(calls: &str) -> Option<CallForm> {
    let source = format!(
        "{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{% for m in messages %}}\
         {{{{ '<|im_start|>' + m.role + '\n' + m.content }}}}{{% if m.tool_calls %}}{calls}{{% endif %}}\
         {{{{ '<|im_end|>\n' }}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
    );
    let tokenizer = chat_tokenizer();
    CallForm::of(&ChatTemplate::new(&source, "the test", &tokenizer).unwrap(), &tokenizer)
}

const EACH: &str = "{% for call in m.tool_calls %}{% set f = call.function %}";
const ONE: &str = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}\
    {% set f = m.tool_calls[0].function %}";

/// The forms of well-known families, an answer in each with content, and whether it has two calls.
fn families() -> Vec<(String, &'static str, usize)> {
    let each = |call: &str| format!("{EACH}{call}{{% endfor %}}");
    let arguments = "{% for k, v in f.arguments.items() %}";
    vec![
        (
            each(
                "{{ '\n<tool_call>\n{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments | tojson + '}\n</tool_call>' }}",
            ),
            "Yes.\n<tool_call>\n{\"name\": \"find\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}\n</tool_call>\n\
             <tool_call>{\"name\": \"find\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}</tool_call>",
            2,
        ),
        (
            format!("{ONE}{{{{ '{{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}}' }}}}"),
            "{\"name\": \"find\", \"parameters\": {\"city\": \"Bern\", \"days\": 3}}",
            1,
        ),
        (
            format!(
                "{{{{ '[TOOL_CALLS] [' }}}}{EACH}{{{{ '{{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments | tojson \
                 + ', \"id\": \"' + call.id + '\"}}' }}}}{{{{ '' if loop.last else ', ' }}}}{{% endfor %}}{{{{ ']' }}}}"
            ),
            "Yes.[TOOL_CALLS][{\"name\": \"find\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}, \
             {\"name\": \"find\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}]",
            2,
        ),
        (
            each("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}"),
            "Yes. [TOOL_CALLS]find[ARGS]{\"city\": \"Bern\", \"days\": 3}[TOOL_CALLS]find[ARGS]{\"city\": \"Bern\", \"days\": 3}",
            2,
        ),
        (
            format!(
                "{{{{ '<calls>' }}}}{}{{{{ '</calls>' }}}}",
                each("{{ '<call>function<sep>' + f.name + '\n```json\n' + f.arguments | tojson + '\n```</call>' }}")
            ),
            "Yes.<calls><call>function<sep>find\n```json\n{\"city\": \"Bern\", \"days\": 3}\n```</call>\
             <call>function<sep>find\n```json\n{\"city\": \"Bern\", \"days\": 3}\n```</call></calls>",
            2,
        ),
        (
            each(&format!(
                "{{{{ '\n<tool_call>\n<function=' + f.name + '>\n' }}}}{arguments}\
                 {{{{ '<parameter=' + k + '>\n' + v | string + '\n</parameter>\n' }}}}{{% endfor %}}\
                 {{{{ '</function>\n</tool_call>' }}}}"
            )),
            "Yes.\n\n<tool_call>\n<function=find>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n\
             </function>\n</tool_call>",
            1,
        ),
        (
            each(&format!(
                "{{{{ '\n<tool_call>' + f.name }}}}{arguments}{{{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v | string \
                 + '</arg_value>' }}}}{{% endfor %}}{{{{ '\n</tool_call>' }}}}"
            )),
            "Yes.\n<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n\
             <arg_value>3</arg_value>\n</tool_call>",
            1,
        ),
        (
            each(&format!(
                "{{{{ 'Go ' + f.name }}}}{arguments}{{{{ ' a ' + k + ' is ' + v | string + '.' }}}}{{% endfor %}}"
            )),
            "Yes. Go find a city is Bern. a days is 3.",
            1,
        ),
    ]
}

/// As [`families`], of calls in JSON.
fn families_of_json() -> Vec<(String, &'static str, usize)> {
    let each = |call: &str| format!("{EACH}{call}{{% endfor %}}");
    vec![
        (
            each("{{ '<function=' + f.name + '>' + f.arguments | tojson + '</function>' }}"),
            "Yes.<function=find>{\"city\": \"Bern\", \"days\": 3}</function>\n\
             <function=find>{\"city\": \"Bern\", \"days\": 3}</function>",
            2,
        ),
        (
            format!(
                "{ONE}{{{{ '<|python_tag|>{{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}}' }}}}"
            ),
            "Yes.<|python_tag|>{\"name\": \"find\", \"parameters\": {\"city\": \"Bern\", \"days\": 3}}",
            1,
        ),
        // Marks that are tokens of their own.
        (
            each("{{ '<s>function<s>' + f.name + '<s>' + f.arguments | tojson + '<s>' }}"),
            "Yes.<s>function<s>find<s>{\"city\": \"Bern\", \"days\": 3}<s><s>function<s>find<s>{\"city\": \"Bern\", \"days\": 3}<s>",
            2,
        ),
        (
            format!(
                "{{{{ '<tool_call>[' }}}}{EACH}{{{{ f | tojson }}}}{{{{ '' if loop.last else ', ' }}}}{{% endfor %}}{{{{ ']</tool_call>' }}}}"
            ),
            "Yes.<tool_call>[{\"name\": \"find\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}, \
             {\"name\": \"find\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}]</tool_call>",
            2,
        ),
        (
            format!(
                "{{{{ '<|START_ACTION|>[' }}}}{EACH}{{{{ '{{\"tool_call_id\": \"' + call.id + '\", \"tool_name\": \"' + f.name \
                 + '\", \"parameters\": ' + f.arguments | tojson + '}}' }}}}{{{{ '' if loop.last else ', ' }}}}{{% endfor %}}\
                 {{{{ ']<|END_ACTION|>' }}}}"
            ),
            "Yes.<|START_ACTION|>[\n{\"tool_call_id\": \"0\", \"tool_name\": \"find\", \"parameters\": {\"city\": \"Bern\", \"days\": 3}}\n\
             ]<|END_ACTION|>",
            1,
        ),
    ]
}

fn tools() -> Value {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    json!([{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": properties}}}])
}

#[test]
fn calls_are_read_as_each_template_writes_them_and_are_no_content() {
    let arguments = json!({"city": "Bern", "days": 3});
    let call = Call { name: "find".to_owned(), arguments: arguments.as_object().unwrap().clone() };
    for (template, text, num_calls) in families().into_iter().chain(families_of_json()) {
        let form = form(&template).unwrap_or_else(|| panic!("{template}"));
        let (content, calls) = form.read(text, &tools()).unwrap_or_else(|| panic!("{form:?}: {text}"));
        assert_eq!(calls, vec![call.clone(); num_calls], "{form:?}");
        let content = text[..content].to_owned();
        assert_eq!(content, if text.starts_with('{') { "" } else { "Yes." });
        // As it is written, piece by piece.
        for size in [1, 7] {
            let mut reader = CallReader::new(form.clone(), &tools(), false);
            let letters: Vec<char> = text.chars().collect();
            let shown: String =
                letters.chunks(size).map(|part| reader.push(&part.iter().collect::<String>())).collect();
            let (rest, calls) = reader.end();
            assert_eq!((format!("{shown}{rest}"), calls.len()), (content.clone(), num_calls), "{form:?}");
            assert_eq!(calls[0]["function"]["name"], "find");
            assert_eq!(calls[0]["function"]["arguments"], r#"{"city":"Bern","days":3}"#);
        }
        assert!(form.read("Yes. It is 3.", &tools()).is_none());
    }
}

#[test]
fn what_is_no_call_stays_text() {
    let whole = |form: &CallForm, text: &str| {
        let mut reader = CallReader::new(form.clone(), &tools(), true);
        let shown = reader.push(text);
        let (rest, calls) = reader.end();
        (format!("{shown}{rest}"), calls.len())
    };
    let [tags, bare, ..] = &families()[..] else { panic!() };
    let (tags, bare) = (form(&tags.0).unwrap(), form(&bare.0).unwrap());
    for text in ["<tool_call>\n{\"name\": \"find\", \"argu", "Is 1 <tool 2? ", "<tool_call>no</tool_call>"] {
        assert_eq!(whole(&tags, text), (text.to_owned(), 0));
    }
    for text in ["{\"name\": \"other\", \"parameters\": {}}", "[1, 2]", "{\"a\": 1}", "Yes."] {
        assert_eq!(whole(&bare, text), (text.to_owned(), 0));
    }
    let call = "{\"name\": \"find\", \"parameters\": {\"city\": \"Bern\"}}";
    assert_eq!(whole(&bare, &format!("<|im_start|> {call}; {call}")), (String::new(), 1));
    // A template without calls has no form, nor one that writes other things than it is given.
    assert!(form("{{ 'called' }}").is_none());
    assert!(form("{{ '<call>' + m.tool_calls[0].function.name }}").is_none());
}

/// A text of tokens that `grammar` allows, drawn as they come, and whether it ended.
fn drawn(mut grammar: Grammar, tokenizer: &Tokenizer, ends: &[u32], seed: u64) -> String {
    let (mut rng, mut ids) = (StdRng::seed_from_u64(seed), Vec::new());
    let logits = vec![0.0; tokenizer.max_id() as usize + 1];
    while let Some(mask) = grammar.mask(&logits, ends).unwrap() {
        let allowed = (0..).zip(mask).filter(|(_, logit)| *logit == 0.0).map(|(id, _)| id);
        let token = allowed.choose(&mut rng).unwrap();
        if ends.contains(&token) {
            break;
        }
        ids.push(token);
        if grammar.take(token).unwrap() {
            break;
        }
    }
    tokenizer.decode(&ids, false).unwrap()
}

#[test]
fn a_text_that_is_held_to_calls_is_read_as_calls_of_the_schema_in_every_form() {
    let tokenizer = chat_tokenizer();
    let grammars = Grammars::new(&tokenizer, tokenizer.max_id() as usize + 1).unwrap();
    let properties = json!({"city": {"type": "string", "enum": ["Bern", "Rom <3"]}, "days": {"$ref": "#/$defs/days"}});
    let days = json!({"days": {"type": "integer", "minimum": 1, "maximum": 30}});
    let find = json!({"type": "object", "properties": properties, "required": ["city"], "$defs": days});
    let tools = json!([{"type": "function", "function": {"name": "find", "parameters": find}},
                       {"type": "function", "function": {"name": "stop_it"}}]);
    let functions: Vec<&Value> = functions(&tools).collect();
    for (template, _, num_calls) in families().into_iter().chain(families_of_json()) {
        let form = form(&template).unwrap();
        let written = form.written.as_ref().unwrap_or_else(|| panic!("{template}"));
        let mut most = 0;
        for seed in 0..12 {
            let allowed = Allowed { functions: &functions, several: seed % 2 == 0, content: None };
            let text = drawn(written.grammar(allowed, &grammars).unwrap(), &tokenizer, tokenizer.eos_ids(), seed);
            let (content, calls) = form.read(&text, &tools).unwrap_or_else(|| panic!("{text}: {written:?}"));
            assert_eq!(content, 0, "{text}");
            assert!(seed % 2 == 0 || calls.len() == 1, "{text}");
            most = most.max(calls.len());
            for Call { name, arguments } in calls {
                let (city, days) = (arguments.get("city"), arguments.get("days").map(Value::as_i64));
                let is_found = city.is_some_and(|city| city == "Bern" || city == "Rom <3");
                assert!(if name == "find" { is_found } else { name == "stop_it" && arguments.is_empty() }, "{text}");
                assert!(days.is_none_or(|days| days.is_some_and(|days| (1..=30).contains(&days))), "{text}");
            }
        }
        assert!(num_calls == 1 || most > 1, "{template}");
        let content = json!({"type": "object", "properties": {"sum": {"enum": [7]}}, "required": ["sum"], "additionalProperties": false});
        let allowed = Allowed { functions: &functions[..1], several: true, content: Some(&content) };
        if template.starts_with(ONE) && !template.contains("python_tag") {
            assert!(written.grammar(allowed, &grammars).unwrap_err().contains("without a mark"));
            continue;
        }
        let texts = (0..24)
            .map(|seed| drawn(written.grammar(allowed, &grammars).unwrap(), &tokenizer, tokenizer.eos_ids(), seed));
        let (calls, contents): (Vec<_>, Vec<_>) = texts.partition(|text| form.read(text, &tools).is_some());
        assert!(!calls.is_empty() && !contents.is_empty(), "{template}");
        for text in contents {
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({"sum": 7}));
        }
    }
}

#[test]
fn what_cannot_be_held_to_says_so() {
    // The name behind the arguments.
    let behind = "{{ '<call>{\"arguments\": ' + m.tool_calls[0].function.arguments | tojson + ', \"name\": \"' + m.tool_calls[0].function.name + '\"}' }}";
    let behind =
        form(&format!("{{% if m.tool_calls | length > 1 %}}{{{{ raise_exception('one') }}}}{{% endif %}}{behind}"));
    assert!(behind.unwrap().written.is_none());
    let (tokenizer, form) = (chat_tokenizer(), form(&families()[0].0).unwrap());
    let grammars = Grammars::new(&tokenizer, tokenizer.max_id() as usize + 1).unwrap();
    let wrong = json!({"name": "find", "parameters": {"type": "object", "properties": {"x": {"type": "string", "format": "nonsense"}}}});
    let allowed = Allowed { functions: &[&wrong], several: true, content: None };
    let error = form.written.unwrap().grammar(allowed, &grammars).unwrap_err();
    assert!(error.starts_with("the parameters of `find`: ") && error.contains("nonsense"), "{error}");
}
