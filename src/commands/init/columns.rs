//! What the columns of rows are, where their names are those of no format: a guess by names and lengths.

use serde_json::Value;

/// Parts of the names of columns that are asked, and of those that answer.
const QUESTIONS: &[&str] = &[
    "prompt", "question", "query", "instruction", "request", "input", "inquiry", "user", "frage", "eingabe", "aufgabe",
    "demande", "requête", "pregunta", "consulta", "pergunta", "domanda", "richiesta", "vraag", "pytanie", "вопрос",
    "问题", "質問",
];
const ANSWERS: &[&str] = &[
    "completion", "answer", "response", "reply", "output", "solution", "assistant", "target", "antwort", "ausgabe",
    "lösung", "réponse", "reponse", "respuesta", "resposta", "risposta", "antwoord", "odpowiedź", "ответ", "答案",
    "回答",
];
/// Parts of the names of answers that were preferred, and of those that were not, which are looked for first.
const REJECTED: &[&str] = &["rejected", "dispreferred", "non_preferred", "loser", "worse"];
const CHOSEN: &[&str] = &["chosen", "preferred", "accepted", "winner", "better"];
/// Parts of the names of columns that stand beside a question and its answer, and are neither.
const BESIDE: &[&str] = &["context", "title", "passage", "document", "source", "url", "category"];
/// Names of columns beside which a pair of texts is no question and its answer.
const CHOSEN_AMONG: &[&str] = &["label", "labels", "choices", "options"];
/// Names of columns that hold no text.
const MEDIA: &[&str] = &["audio", "image", "video", "images", "audios", "videos", "speech"];

/// What rows are, with their columns by our names.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Guess {
    /// A question and its answer, a text, or a conversation.
    Columns(Vec<(&'static str, String)>),
    /// A better and a worse answer.
    Preferences(Vec<(&'static str, String)>),
    /// Triples for a model of embeddings.
    Embeddings,
}

impl Guess {
    /// A guess from the first rows.
    pub(super) fn of(rows: &[Value]) -> Option<Self> {
        let first = rows.first()?.as_object()?;
        let has = |name: &str| first.keys().any(|own| own.eq_ignore_ascii_case(name));
        if ["positive", "negative"].into_iter().all(has) && ["anchor", "query"].into_iter().any(has) {
            return Some(Self::Embeddings);
        }
        let is_pair = first.keys().any(|name| mentions(name, REJECTED) || mentions(name, CHOSEN));
        let is_talk = |name: &&String| is_conversation(&rows[0][name.as_str()]);
        // An answer that was preferred is none without its question.
        if let Some(talk) = first.keys().find(is_talk).filter(|_| !is_pair) {
            let ours = if rows[0][talk][0]["role"].is_null() { "conversations" } else { "messages" };
            return Some(Self::Columns(vec![(ours, talk.clone())]));
        }
        let texts: Vec<Column> = first.keys().filter_map(|name| Column::of(name, rows)).collect();
        let named = |words: &[&str], but: &[&Column]| {
            let named = texts.iter().filter(|column| column.is_named(words) && !but.contains(column));
            named.max_by_key(|column| column.bytes)
        };
        let longest = |but: &[&Column]| {
            let others = texts.iter().filter(|column| !but.contains(column));
            // Of equal ones the first.
            others.filter(|column| !column.is_named(BESIDE)).rev().max_by_key(|column| column.bytes)
        };
        let pair = |names: [(&'static str, &Column); 2]| names.map(|(ours, column)| (ours, column.name.to_owned()));
        if let Some(rejected) = named(REJECTED, &[]) {
            let chosen = named(CHOSEN, &[rejected])?;
            let prompt = named(QUESTIONS, &[rejected, chosen]).or_else(|| longest(&[rejected, chosen]));
            let prompt = prompt.map(|prompt| ("prompt", prompt.name.to_owned()));
            let answers = pair([("chosen", chosen), ("rejected", rejected)]);
            return Some(Self::Preferences(prompt.into_iter().chain(answers).collect()));
        }
        // An answer that is no text, or is one of several.
        let is_other = |name: &String| mentions(name, ANSWERS) && texts.iter().all(|column| column.name != name);
        let is_among = texts.len() > 1 && CHOSEN_AMONG.iter().any(|name| has(name));
        if is_pair || is_among || first.keys().any(is_other) {
            return None;
        }
        let answer = named(ANSWERS, &[]);
        let question = named(QUESTIONS, &answer.into_iter().collect::<Vec<_>>());
        let (prompt, completion) = match (question, answer) {
            (Some(question), Some(answer)) => (question, answer),
            (Some(question), None) => (question, longest(&[question])?),
            (None, Some(answer)) => (longest(&[answer])?, answer),
            (None, None) => {
                let one = longest(&[])?;
                let Some(other) = longest(&[one]) else {
                    return Some(Self::Columns(vec![("text", one.name.to_owned())]));
                };
                let [at, at_other] = [one, other].map(|of| texts.iter().position(|column| column == of));
                if at < at_other { (one, other) } else { (other, one) }
            }
        };
        Some(Self::Columns(pair([("prompt", prompt), ("completion", completion)]).to_vec()))
    }
}

/// Whether one of these words is in a name.
fn mentions(name: &str, words: &[&str]) -> bool {
    let name = name.to_lowercase();
    words.iter().any(|word| name.contains(word))
}

/// A column of texts.
#[derive(Debug, PartialEq, Eq)]
struct Column<'r> {
    name: &'r str,
    /// Of all its texts.
    bytes: usize,
}

impl<'r> Column<'r> {
    /// A column whose values are texts, if they are no numbers.
    fn of(name: &'r str, rows: &[Value]) -> Option<Self> {
        let values = || rows.iter().map(|row| &row[name]).filter(|value| !value.is_null() && **value != "");
        let is_text = |value: &Value| value.as_str().is_some_and(|text| text.parse::<f64>().is_err());
        let bytes = values().filter_map(Value::as_str).map(str::len).sum();
        (values().all(Value::is_string) && values().any(is_text)).then_some(Self { name, bytes })
    }

    fn is_named(&self, words: &[&str]) -> bool {
        mentions(self.name, words)
    }
}

/// The columns of sound or pictures among those that are not read.
pub(super) fn media(unread: &[String]) -> Option<&String> {
    unread.iter().find(|name| MEDIA.contains(&name.to_lowercase().as_str()))
}

/// Whether a column begins with a message.
fn is_conversation(value: &Value) -> bool {
    value.get(0).is_some_and(|message| !message["role"].is_null() || !message["from"].is_null())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn columns(names: &[(&'static str, &str)]) -> Guess {
        Guess::Columns(names.iter().map(|(ours, theirs)| (*ours, (*theirs).to_owned())).collect())
    }

    #[test]
    fn questions_and_answers_are_found_by_their_names_else_by_their_lengths() {
        let mail = json!({
            "Datum": "2026-01-03", "Betreff": "Mein Toaster, der von gestern", "Anfrage": "Er raucht", "Antwort": "Ja",
            "Status": "zu",
        });
        assert_eq!(Guess::of(&[mail]), Some(columns(&[("prompt", "Anfrage"), ("completion", "Antwort")])));
        let swapped = json!({"id": "a1", "Respuesta": "Sí", "Pregunta": "¿Va?"});
        assert_eq!(Guess::of(&[swapped]), Some(columns(&[("prompt", "Pregunta"), ("completion", "Respuesta")])));
        let one = json!({"n": "17", "customer_question": "Why?", "note": "Because it is so.", "x": 3});
        assert_eq!(Guess::of(&[one]), Some(columns(&[("prompt", "customer_question"), ("completion", "note")])));
        // The first row alone would mislead.
        let unnamed = [
            json!({"k": "aaaaaaaa", "a": "?", "b": "!"}),
            json!({"k": "b", "a": "is it so?".repeat(9), "b": "it is".repeat(9)}),
        ];
        assert_eq!(Guess::of(&unnamed), Some(columns(&[("prompt", "a"), ("completion", "b")])));
        assert_eq!(Guess::of(&[json!({"review": "fine", "year": 3})]), Some(columns(&[("text", "review")])));
        assert_eq!(
            Guess::of(&[json!({"dialogue": [{"role": "user", "content": "a"}]})]),
            Some(columns(&[("messages", "dialogue")]))
        );
        assert_eq!(
            Guess::of(&[json!({"turns": [{"from": "human", "value": "a"}]})]),
            Some(columns(&[("conversations", "turns")]))
        );
        assert_eq!(Guess::of(&[json!({"a": 1, "b": null})]), None);
        // What would be trained on is not what the rows are for.
        for other in [
            json!({"title": "T", "context": "Long text.", "question": "Who?", "answers": {"text": ["He"]}}),
            json!({"context": "Long text.", "question": "Who?"}),
            json!({"sentence1": "It rains.", "sentence2": "It is wet.", "label": 0}),
            json!({"question": "Which?", "choices": {"text": ["a", "b"]}, "answerKey": "B"}),
            json!({"input": {"messages": []}, "preferred_output": [{"role": "assistant", "content": "a"}]}),
        ] {
            assert_eq!(Guess::of(std::slice::from_ref(&other)), None, "{other}");
        }
    }

    #[test]
    fn answers_that_were_compared_are_preferences_and_triples_are_for_embeddings() {
        let pair = json!({"question": "a?", "chosen_response": "b", "rejected_response": "cc"});
        let names = [("prompt", "question"), ("chosen", "chosen_response"), ("rejected", "rejected_response")];
        let expected = names.map(|(ours, theirs)| (ours, theirs.to_owned())).to_vec();
        assert_eq!(Guess::of(&[pair]), Some(Guess::Preferences(expected)));
        assert_eq!(Guess::of(&[json!({"anchor": "a", "positive": "b", "negative": "c"})]), Some(Guess::Embeddings));
        let names = ["id", "Audio"].map(str::to_owned);
        assert_eq!(media(&names), Some(&names[1]));
    }
}
