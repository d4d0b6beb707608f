use std::fs;
use std::path::Path;
use std::sync::Arc;

use tempfile::TempDir;

use super::*;
use crate::config::EnvironmentConfig;
use crate::data::fixture::chat_tokenizer;

const TEMPLATE: &str = "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}\
    {% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}{{ m.content }}{% endif %}\
    {% for call in m.tool_calls %}{{ '<call>' + call.function | tojson + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Asks for numbers until the third. What goes wrong with an episode is in its row, and what has gone wrong once in a folder.
const NUMBERS: &str = r#"
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
folder, parallel = sys.argv[1], int(sys.argv[2])
rows, out = {}, os.fdopen(os.dup(1), "w")
def say(**what):
    out.write(json.dumps(what) + "\n"); out.flush()
def trouble(row, turn):
    where, what, *once = row["how"].split()
    if turn != int(where): return None
    if once:
        mark = os.path.join(folder, row["prompt"])
        if os.path.exists(mark): return None
        open(mark, "w").close()
    return what
def play(question):
    i, do = question["id"], question["do"]
    if do == "close": return rows.pop(i, None)
    turn = question.get("turn", 0)
    if do == "reset":
        rows[i] = question["row"]
    row = rows[i]
    what = trouble(row, turn) if row["how"] else None
    if what == "kill": os._exit(3)
    if what == "hang": time.sleep(99)
    if what == "fail": return say(id=i, failed="no luck")
    if what == "stop": return say(id=i, failed="hopeless", retry=False)
    if what == "junk": return say(id=i, observation=7)
    if what == "mad": return say(id=i, reward=1e300)
    if do == "reset": return say(id=i, observation=" Seed %d." % question["seed"])
    print("printed", file=sys.stderr)
    last = question["message"]["content"]
    assert len(question["ids"]) == len(last) - last.count("ab") + (not question["truncated"])
    say(id=i, observation=[{"role": "user", "content": "ab more %d" % turn}], reward=0.5, done=turn == 3,
        metrics={"turn": turn})
say(hello=1, name="numbers", max_parallel=parallel)
pool = ThreadPoolExecutor(parallel)
for line in sys.stdin:
    (play if parallel == 1 else lambda question: pool.submit(play, question))(json.loads(line))
"#;

struct Table {
    tokenizer: Arc<Tokenizer>,
    objective: ObjectiveConfig,
    rows: Vec<PromptRow>,
}

fn row(prompt: &str, how: &str) -> PromptRow {
    let value = json!({"prompt": prompt, "how": how});
    let prompt = json!([{"role": "user", "content": prompt}]);
    PromptRow { value, prompt, tools: None, prompt_column: "prompt".into() }
}

/// The environment in a folder of its own.
fn numbers(parallel: usize) -> (TempDir, EnvironmentConfig) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("numbers.py");
    fs::write(&file, NUMBERS).unwrap();
    let words = ["python3", file.to_str().unwrap(), folder.path().to_str().unwrap(), &parallel.to_string()];
    let command = words.map(str::to_owned).to_vec();
    (folder, EnvironmentConfig { command, max_seconds: 3.0, ..EnvironmentConfig::default() })
}

impl Table {
    fn new(environment: EnvironmentConfig, rows: Vec<PromptRow>) -> Self {
        let objective = ObjectiveConfig { environment, max_completion_length: 400, ..ObjectiveConfig::default() };
        Self { tokenizer: chat_tokenizer(), objective, rows }
    }

    fn template(&self) -> ChatTemplate {
        ChatTemplate::new(TEMPLATE, "the test", &self.tokenizer).unwrap()
    }

    /// Plays all rows, where the model says `says(turn, seed)`.
    fn play(&self, log: Option<&Path>, says: impl Fn(usize, u64) -> String) -> Result<Vec<Played>, String> {
        let mut environment = Environment::new(&self.objective.environment)?;
        environment.start(log, &|| false)?;
        let template = self.template();
        let (state, max_length, max_open) = (JudgeState::default(), 1000, 40);
        let (objective, tokenizer, template) = (&self.objective, &*self.tokenizer, &template);
        let rules = Rules { objective, tokenizer, template, max_length, max_open, state };
        let start = |(seed, row)| Start { row, environment_seed: 5 << 11, seed };
        let starts: Vec<_> = (0..).zip(&self.rows).map(start).collect();
        let mut episodes = Episodes::new(&mut environment, rules, &starts);
        let mut turns = Vec::new();
        while !episodes.are_over() {
            episodes.advance(!turns.is_empty(), &|| false).map_err(|(_, reason)| reason)?;
            turns.extend(std::iter::from_fn(|| episodes.next_turn()).take(16));
            for turn in turns.drain(..) {
                let written = turn.ids.iter().rev().take_while(|id| **id != 258).count();
                assert_eq!(written, "assistant\n".len(), "an answer is asked for");
                let said = says(episodes.all[turn.index].played.turns, turn.seed);
                let ids = tokenizer.encode(&said, false).unwrap();
                let is_cut = ids.len() >= turn.max_new_tokens;
                let ids = &ids[..ids.len().min(turn.max_new_tokens)];
                let last = if is_cut { Ending::MaxNewTokens } else { Ending::EndOfText };
                let new = NewText {
                    text: String::new(),
                    token: None,
                    end_token: None,
                    entropy: None,
                    shown: Vec::new(),
                    ending: None,
                };
                let mut texts = ids.iter().map(|id| NewText {
                    text: tokenizer.decode(&[*id], false).unwrap(),
                    token: Some(*id),
                    ending: (is_cut && Some(id) == ids.last()).then_some(last),
                    ..new.clone()
                });
                let goes_on = texts.all(|new| episodes.take_text(turn.id, &new).is_continue());
                if goes_on && !is_cut {
                    let end = NewText { end_token: Some(259), ending: Some(last), ..new };
                    assert!(episodes.take_text(turn.id, &end).is_continue());
                }
                episodes.end_turn(turn.id, None);
            }
        }
        Ok(episodes.into_played())
    }

    /// Holds an episode to the tokens of its whole conversation, as the template writes it.
    fn assert_exact(&self, played: &Played, tools: Option<&Value>) {
        let messages = [&played.prompt[..], &played.messages].concat();
        let whole = self.template().render(&messages, tools, false).unwrap();
        let ids = [&played.prompt_ids[..], &played.ids].concat();
        assert_eq!(ids, self.tokenizer.encode(whole.trim_end(), false).unwrap(), "{whole}");
        // What carries loss is what was drawn.
        let drawn: Vec<u32> =
            played.ids.iter().zip(&played.is_drawn).filter(|(_, is)| **is).map(|(id, _)| *id).collect();
        let said = played.messages.iter().filter(|message| message["role"] == "assistant").map(|message| {
            let call = |call: &Value| format!("<call>{}</call>", jinja_json(&call["function"]));
            let calls: String = message["tool_calls"].as_array().into_iter().flatten().map(call).collect();
            format!("{}{calls}<|im_end|>", message["content"].as_str().unwrap())
        });
        assert_eq!(drawn, self.tokenizer.encode(&said.collect::<String>(), false).unwrap());
    }
}

/// JSON as templates write it.
fn jinja_json(value: &Value) -> String {
    value.to_string().replace("\":", "\": ").replace(",\"", ", \"")
}

fn says(turn: usize, seed: u64) -> String {
    format!("ab {seed} a{turn}")
}

#[test]
fn of_256_episodes_with_failures_kills_and_time_outs_none_is_lost() {
    let all = |with_trouble: bool| {
        let how = |index: usize| match index {
            _ if !with_trouble => "",
            3 => "0 fail",
            7 => "2 fail",
            11 => "2 fail once",
            19 => "1 stop",
            20 => "0 junk",
            21 => "2 junk",
            22 => "1 mad",
            40 => "2 kill once",
            41 => "1 kill",
            90 => "0 kill once",
            120 => "2 hang once",
            130 => "1 hang",
            _ => "",
        };
        (0..256).map(|index| row(&index.to_string(), how(index))).collect::<Vec<_>>()
    };
    let (folder, config) = numbers(1);
    let smooth = Table::new(config, all(false));
    let undisturbed = smooth.play(Some(&folder.path().join("episodes.log")), says).unwrap();
    for played in &undisturbed {
        let figures = (played.turns, played.reward, played.ended, played.retries, played.metrics["turn"]);
        assert_eq!(figures, (3, Some(1.5), Ended::Done, 0, 3.0));
        assert!(played.prompt[0]["content"].as_str().unwrap().ends_with(" Seed 5."), "{:?}", played.prompt);
        assert_eq!(played.messages.len(), 5);
        smooth.assert_exact(played, None);
    }
    for parallel in [1, 32] {
        let (folder, config) = numbers(parallel);
        let log = folder.path().join("episodes.log");
        let rough = Table::new(config, all(true)).play(Some(&log), says).unwrap();
        let failed = [3, 7, 19, 20, 21, 22, 41, 130];
        for (index, (played, other)) in rough.iter().zip(&undisturbed).enumerate() {
            if failed.contains(&index) {
                assert!(played.failure.is_some() && played.ended == Ended::Failed, "{index}: {played:?}");
                // What cannot be retried is not.
                assert_eq!(played.retries, usize::from(![19, 20, 21, 22].contains(&index)), "{index}");
            } else {
                assert_eq!((&played.ids, &played.reward), (&other.ids, &other.reward), "{index}");
                // Who was asked alone when it ended has failed, and who was asked beside others may not have, nor whose reply was not
                // read before another's end.
                let has_failed = parallel == 1 && [11, 40, 90, 120].contains(&index);
                assert!(played.retries <= 1 && (!has_failed || played.retries == 1), "{index}, {parallel}");
            }
        }
        let log = fs::read_to_string(log).unwrap();
        assert!(parallel > 1 || log.contains("episode 11, turn 2: no luck; it begins anew"), "{log}");
        for what in [
            "episode 19, turn 1: hopeless; it has failed",
            "(exit status: 3)",
            "it has not replied within 3 s",
            "printed",
            "neither text nor messages: 7",
            "is beyond 1e15",
        ] {
            assert!(log.contains(what), "{what}: {log}");
        }
    }
}

#[test]
fn an_episode_ends_where_its_tokens_or_its_turns_end() {
    let (_folder, config) = numbers(1);
    let mut all = Table::new(EnvironmentConfig { max_turns: 2, ..config }, vec![row("x", ""), row("y", "")]);
    let of = |all: &Table| all.play(None, says).unwrap().remove(1);
    let turns = of(&all);
    assert_eq!((turns.ended, turns.turns, turns.messages.len(), turns.reward), (Ended::Turns, 2, 3, Some(1.0)));
    all.assert_exact(&turns, None);
    // The first answer has 7 tokens, what follows it more than 3.
    all.objective.max_completion_length = 10;
    let played = of(&all);
    assert_eq!((played.ended, played.turns, played.ids.len(), played.messages.len()), (Ended::Length, 1, 7, 1));
    all.objective.max_completion_length = 5;
    let played = of(&all);
    assert_eq!((played.ended, played.turns, played.ids.len(), played.reward), (Ended::Length, 1, 5, Some(0.5)));
    all.objective.max_completion_length = turns.ids.len() - 1;
    let played = of(&all);
    assert_eq!((played.ended, played.turns, played.ids.len()), (Ended::Length, 2, turns.ids.len() - 1));
    all.rows[1] = row(&"x".repeat(1000), "");
    let failure = of(&all).failure.unwrap();
    assert!(failure.contains("tokens, with tools, and `data.max_length` is 1000"), "{failure}");
}

#[test]
fn a_class_and_functions_of_a_python_file_are_played_as_trl_plays_them() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("game.py");
    let text = r#"
import asyncio
from typing import Literal, Optional

class Game:
    def reset(self, goal, **row):
        self.goal, self.tries = goal, 0
        return None

    def guess(self, n: int, why: Optional[list[str]] = None) -> str:
        """Guess the number.

        Args:
            n: The number,
                as a whole.
            why: Reasons.

        Returns:
            Whether it is higher.
        """
        self.tries += 1
        if n < 0:
            raise ValueError("below zero")
        return "right" if n == self.goal else "higher"

    def get_reward(self):
        return 1 / self.tries if self.tries else None

async def add(a: float, b: Literal[1, 2]):
    """Add."""
    await asyncio.sleep(0.01)
    return a + b
"#;
    fs::write(&file, text).unwrap();
    let config = EnvironmentConfig {
        python: Some(file.clone()),
        class: Some("Game".into()),
        tools: vec!["add".into()],
        ..EnvironmentConfig::default()
    };
    let game = |goal: u64| PromptRow { value: json!({"goal": goal}), ..row("Go.", "") };
    let all = Table::new(config.clone(), vec![game(7), game(3)]);
    let call = |name: &str, arguments: Value| {
        format!("<call>{}</call>", jinja_json(&json!({"name": name, "arguments": arguments})))
    };
    let played = all
        .play(None, |turn, _| match turn {
            0 => format!("So: {}{}", call("guess", json!({"n": -1})), call("add", json!({"a": 1.5, "b": 2}))),
            1 => call("leave", json!({})),
            2 => call("guess", json!({"n": 7})),
            _ => "7.".into(),
        })
        .unwrap();
    let mut environment = Environment::new(&config).unwrap();
    environment.start(None, &|| false).unwrap();
    let tools = environment.tools(None).unwrap();
    let guess = json!({"type": "function", "function": {"name": "guess", "description": "Guess the number.", "parameters": {
        "type": "object", "properties": {
            "n": {"type": "integer", "description": "The number, as a whole."},
            "why": {"type": "array", "items": {"type": "string"}, "nullable": true, "description": "Reasons."}},
        "required": ["n"]}}});
    assert_eq!((&tools[1], &tools[0]["function"]["parameters"]["properties"]["b"]["enum"]), (&guess, &json!([1, 2])));
    let said = |played: &Played| -> Vec<Value> {
        let replies = played.messages.iter().filter(|message| message["role"] == "tool");
        replies.map(|reply| reply["content"].clone()).collect()
    };
    let errors = ["{'error': 'below zero'}", "3.5", "{'error': 'Tool leave not found.'}"];
    assert_eq!(said(&played[0]), [&errors[..], &["right"]].concat());
    assert_eq!(said(&played[1]), [&errors[..], &["higher"]].concat());
    for played in &played {
        let counts = (played.turns, played.calls, played.failed_calls, played.reward, played.ended);
        assert_eq!(counts, (4, 4, 2, Some(0.5), Ended::Done));
        assert_eq!((&played.messages[0]["content"], &*played.answer), (&json!("So:"), "7."));
    }
    // The space before the calls is no content, so only the other turns are those of a whole rendering.
    let plain =
        all.play(None, |turn, _| if turn == 0 { call("guess", json!({"n": 7})) } else { "Yes.".into() }).unwrap();
    all.assert_exact(&plain[0], Some(&tools));
    // Functions alone, and no reward.
    let config = EnvironmentConfig { class: None, ..config };
    let alone = Table::new(config, vec![game(1)]);
    let played =
        alone.play(None, |turn, _| if turn == 0 { call("add", json!({"a": 1, "b": 1})) } else { "2".into() }).unwrap();
    assert_eq!((&played[0].messages[1]["content"], played[0].reward), (&json!("2"), None));
}

#[test]
fn an_environment_that_cannot_be_used_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("game.py");
    let write = |text: &str| fs::write(&file, text).unwrap();
    let of = |class: &str| EnvironmentConfig {
        python: Some(file.clone()),
        class: Some(class.into()),
        max_seconds: 1.0,
        ..EnvironmentConfig::default()
    };
    let imported = folder.path().join("game.py.imported");
    write("open(__file__ + '.imported', 'w')\nclass Game:\n    def reset(self): pass\n");
    let near = Environment::new(&of("Gane")).unwrap_err();
    assert!(near.contains("`class`: ") && near.contains("did you mean `Game`?"), "{near}");
    let mut environment = Environment::new(&of("Game")).unwrap();
    assert!(!imported.exists(), "what is only opened is not imported");
    environment.start(None, &|| false).unwrap();
    assert!(imported.exists());
    for (text, message) in [
        ("class Game: pass", "TypeError: Game has no method `reset`"),
        (
            "class Game:\n    def reset(self): pass\n    def go(self, x: int): pass",
            "`go` is a tool and has no docstring",
        ),
        ("import no_such_module  # Game", "ModuleNotFoundError"),
        ("import os; os._exit(2)  # Game", "has ended (exit status: 2)"),
    ] {
        write(text);
        let error = Environment::new(&of("Game")).unwrap().start(None, &|| false).unwrap_err();
        assert!(error.contains(message), "{text}: {error}");
    }
    let command = |script: &str| EnvironmentConfig {
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        max_seconds: 1.0,
        ..EnvironmentConfig::default()
    };
    let wrong = Environment::new(&command("echo hello; sleep 9")).unwrap().start(None, &|| false).unwrap_err();
    assert!(wrong.contains("has written \"hello\", expected {\"hello\": 1, ...}"), "{wrong}");
    let absent = Environment::new(&EnvironmentConfig { command: vec!["no-such".into()], ..command("") }).unwrap_err();
    assert!(absent.contains("`objective.environment`, `command`: there is no no-such"), "{absent}");
    // One that ends at every question is given up.
    let rows: Vec<PromptRow> = (0..20).map(|index| row(&index.to_string(), "")).collect();
    let ending = Table::new(command("echo '{\"hello\": 1}'; read -r line; exit 4"), rows.clone());
    let error = ending.play(None, says).unwrap_err();
    assert!(error.contains("(exit status: 4)") && error.contains("has not replied"), "{error}");
    // One failure ends a run that wants it to.
    let (_folder, config) = numbers(1);
    let config = EnvironmentConfig { on_failure: OnFailure::Stop, retries: 0, ..config };
    let error = Table::new(config, vec![row("1", ""), row("2", "1 fail")]).play(None, says).unwrap_err();
    assert_eq!(error, "its environment has failed: no luck");
}
