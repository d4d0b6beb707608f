//! Functions of a program, with what they use: a file of their own, which neither loads nor trains a model.

use std::collections::BTreeSet;

use super::tokens::{Token, tokens};

/// What loads, writes and trains: a statement with one of these is left out.
const WORK: [&str; 8] = [
    "from_pretrained", "get_peft_model", "load_dataset", "apply_chat_template", "generate", "fast_generate", "train",
    "push_to_hub",
];

/// A statement that is in no other.
struct Statement {
    text: String,
    tokens: Vec<Token>,
}

/// The statements that functions of these names need, and the names among those that they use which only statements define that
/// are left out. `None` where the program does not define all of them.
pub(in crate::commands::init) fn functions(program: &str, names: &[&str]) -> Option<(String, Vec<String>)> {
    let statements = statements(program);
    let defined: Vec<BTreeSet<String>> = statements.iter().map(Statement::defines).collect();
    let (mut kept, mut absent) = (BTreeSet::new(), Vec::new());
    let (mut wanted, mut seen) = (names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(), BTreeSet::new());
    while let Some(name) = wanted.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        let of_name: Vec<usize> = (0..statements.len()).filter(|&at| defined[at].contains(&name)).collect();
        let (works, plain): (Vec<usize>, Vec<usize>) = of_name.into_iter().partition(|&at| statements[at].works());
        if plain.is_empty() && !works.is_empty() {
            absent.push(name.clone());
        }
        for at in plain.into_iter().filter(|&at| kept.insert(at)) {
            wanted.extend(statements[at].uses());
        }
    }
    let is_there = |name: &&str| kept.iter().any(|&at| defined[at].contains(*name));
    let text = |at: &usize| statements[*at].text.trim_end().to_owned() + "\n";
    names.iter().all(is_there).then(|| (kept.iter().map(text).collect::<Vec<_>>().join("\n"), absent))
}

/// A function that judges environments.
pub(in crate::commands::init) enum JudgeOfEnvironments {
    /// It is called so for `self`, within the class of these.
    Called(String),
    /// It needs more than these, or asks them for the reward.
    NotCalled,
}

/// The function of a program, if it takes `environments`.
pub(in crate::commands::init) fn judge_of_environments(program: &str, function: &str) -> Option<JudgeOfEnvironments> {
    let statements = statements(program);
    let defines = |statement: &&Statement| statement.definition().is_some_and(|(_, name)| name == function);
    let statement = statements.iter().rev().find(defines)?;
    let (at, _) = statement.definition()?;
    let parameters = parameters(&statement.tokens[at..]);
    let uses = |name: &str| statement.tokens.iter().filter(|token| token.is_name(name)).count() - 1;
    let others: Vec<_> = parameters.iter().filter(|name| **name != "environments").collect();
    if others.len() == parameters.len() {
        return None;
    }
    let is_callable = others.iter().all(|name| uses(name) == 0) && !statement.text.contains("get_reward(");
    if !is_callable {
        return Some(JudgeOfEnvironments::NotCalled);
    }
    let others: String = others.iter().map(|name| format!(", {name}=[None]")).collect();
    Some(JudgeOfEnvironments::Called(format!("{function}(environments=[self]{others})[0]")))
}

/// The parameters of a function, whose name these tokens begin with, but for those that take any number of arguments.
fn parameters(tokens: &[Token]) -> Vec<&str> {
    let (mut names, mut depth) = (Vec::new(), 0);
    for pair in tokens.windows(2) {
        match &pair[0] {
            Token::Sign('(' | '[' | '{') => depth += 1,
            Token::Sign(')' | ']' | '}') if depth == 1 => break,
            Token::Sign(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        let is_parameter = depth == 1 && matches!(pair[0], Token::Sign('(' | ','));
        names.extend(name_of(&pair[1]).filter(|_| is_parameter));
    }
    names
}

/// Cuts a program where a line begins a statement at its margin.
fn statements(program: &str) -> Vec<Statement> {
    let mut parts: Vec<String> = Vec::new();
    for line in program.split_inclusive('\n') {
        let first = line.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        let is_at_margin = !line.starts_with([' ', '\t', '\n', '\r', '#', ')', ']', '}']);
        let goes_on = ["else", "elif", "except", "finally"].contains(&first);
        match parts.last_mut() {
            Some(last) if !is_at_margin || goes_on || is_open(last) => last.push_str(line),
            _ => parts.push(line.to_owned()),
        }
    }
    parts.into_iter().map(|text| Statement { tokens: tokens(&text), text }).collect()
}

/// Whether a statement goes on at the margin: within brackets or a text of several lines, after a backslash, or after a decorator.
fn is_open(text: &str) -> bool {
    let is_decorator =
        text.starts_with('@') && !["\ndef ", "\nasync def ", "\nclass "].iter().any(|head| text.contains(head));
    let (mut rest, mut depth) = (text, 0_i32);
    while let Some(next) = rest.chars().next() {
        let quote = ["\"\"\"", "'''", "\"", "'"].into_iter().find(|quote| rest.starts_with(quote));
        rest = match (next, quote) {
            (_, Some(quote)) => match end_of_text(&rest[quote.len()..], quote) {
                Some(after) => after,
                None => return true,
            },
            ('#', _) => rest.find('\n').map_or("", |at| &rest[at..]),
            _ => {
                depth += i32::from("([{".contains(next)) - i32::from(")]}".contains(next));
                &rest[next.len_utf8()..]
            }
        };
    }
    depth > 0 || is_decorator || text.trim_end().ends_with('\\')
}

/// What follows the quotes that end a text; a text of one quote ends with its line.
fn end_of_text<'t>(text: &'t str, quote: &str) -> Option<&'t str> {
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '\\' => drop(characters.next()),
            '\n' if quote.len() == 1 => return Some(&text[at..]),
            _ if text[at..].starts_with(quote) => return Some(&text[at + quote.len()..]),
            _ => {}
        }
    }
    None
}

impl Statement {
    /// The name behind `def` or `class`, and where in the tokens it is.
    fn definition(&self) -> Option<(usize, &str)> {
        let is_head = |token: &Token| token.is_name("def") || token.is_name("class");
        let starts =
            |at: &usize| *at == 0 || self.tokens[*at - 1] == Token::End || self.tokens[*at - 1].is_name("async");
        let at = (0..self.tokens.len()).filter(starts).find(|&at| is_head(&self.tokens[at]))? + 1;
        let is_whole = self.tokens[0] == Token::Sign('@') || at <= 2;
        match self.tokens.get(at) {
            Some(Token::Name(name)) if is_whole => Some((at, name)),
            _ => None,
        }
    }

    fn defines(&self) -> BTreeSet<String> {
        if let Some((_, name)) = self.definition() {
            return BTreeSet::from([name.to_owned()]);
        }
        let mut names = assigned(&self.tokens);
        let is_import = |token: &Token| token.is_name("import");
        for line in self.tokens.split(|token| *token == Token::End) {
            let Some(at) = line.iter().position(is_import) else { continue };
            for item in line[at + 1..].split(|token| *token == Token::Sign(',')) {
                let mut words = item.iter().filter_map(name_of);
                let is_renamed = item.iter().any(|token| token.is_name("as"));
                names.extend(if is_renamed { words.next_back() } else { words.next() }.map(str::to_owned));
            }
        }
        names
    }

    /// The names that it uses and does not give itself.
    fn uses(&self) -> Vec<String> {
        let mut used: BTreeSet<String> = self.tokens.iter().filter_map(name_of).map(str::to_owned).collect();
        for token in &self.tokens {
            if let Token::Format(text) = token {
                let inside = text.split('{').skip(1).filter_map(|part| part.split('}').next());
                used.extend(
                    inside.flat_map(|code| {
                        tokens(code).iter().filter_map(name_of).map(str::to_owned).collect::<Vec<_>>()
                    }),
                );
            }
        }
        if let Some((at, _)) = self.definition() {
            let global = |tokens: &[Token]| tokens.iter().filter_map(name_of).map(str::to_owned).collect::<Vec<_>>();
            let lines = self.tokens.split(|token| *token == Token::End);
            let globals: Vec<String> = lines
                .filter(|line| line.first().is_some_and(|token| token.is_name("global")))
                .flat_map(global)
                .collect();
            let own = &assigned(&self.tokens[at..]) | &bound(&self.tokens[at..]);
            used.retain(|name| !own.contains(name) || globals.contains(name));
        }
        used.into_iter().collect()
    }

    /// Whether it does more than to define something.
    fn works(&self) -> bool {
        let works = |token: &Token| {
            name_of(token)
                .is_some_and(|name| WORK.contains(&name) || name.ends_with("Trainer") || name.ends_with("Config"))
        };
        let is_import = self.tokens.first().is_some_and(|token| token.is_name("import") || token.is_name("from"));
        self.definition().is_none() && !is_import && self.tokens.iter().any(works)
    }
}

fn name_of(token: &Token) -> Option<&str> {
    match token {
        Token::Name(name) => Some(name),
        _ => None,
    }
}

/// The parameters of a function, whose name these tokens begin with, and the names behind `for` in it.
fn bound(tokens: &[Token]) -> BTreeSet<String> {
    let (mut names, mut depth, mut is_head, mut is_loop) = (BTreeSet::new(), 0, true, false);
    for pair in tokens.windows(2) {
        match &pair[0] {
            Token::Sign('(' | '[' | '{') => depth += 1,
            Token::Sign(')' | ']' | '}') => depth -= 1,
            token => is_loop = token.is_name("for") || is_loop && !token.is_name("in"),
        }
        is_head &= !(depth == 0 && pair[0] == Token::Sign(')'));
        let is_parameter = is_head && depth == 1 && matches!(pair[0], Token::Sign('(' | ',' | '*'));
        names.extend(name_of(&pair[1]).filter(|name| (is_parameter || is_loop) && *name != "in").map(str::to_owned));
    }
    names
}

/// Names that statements assign to outside of brackets, one or several, with an annotation or without.
fn assigned(tokens: &[Token]) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in tokens.split(|token| *token == Token::End) {
        let mut depth = 0;
        let end = line.iter().position(|token| {
            match token {
                Token::Sign('(' | '[' | '{') => depth += 1,
                Token::Sign(')' | ']' | '}') => depth -= 1,
                _ => {}
            }
            depth == 0 && *token == Token::Sign('=')
        });
        let Some(end) = end else { continue };
        let target = line[..end].split(|token| *token == Token::Sign(':')).next().unwrap_or_default();
        let is_target = |token: &Token| matches!(token, Token::Name(_) | Token::Sign(',' | '(' | ')'));
        if target.iter().all(is_target) {
            names.extend(target.iter().filter_map(name_of).map(str::to_owned));
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_taken_with_what_they_use_and_nothing_that_loads_or_trains() {
        let program = r#"import re, os.path as path
from unsloth import FastLanguageModel
from trl.rewards import accuracy_reward
model, tokenizer = FastLanguageModel.from_pretrained(
    "m",
)
START = "<a>"
pattern = re.compile(
    rf"{START}.*{END}", flags = re.DOTALL
)
END: str = """
def no(): pass
"""
text = tokenizer.apply_chat_template("x")
# A comment.
def helper(text):
    return text.count(END)

global times
times = 0
@decorated(
  1)
def judge(prompts, completions, **kwargs):
    global times
    times = times + 1
    text = completions[0]  # def text(
    return [helper(text) + len(pattern.findall(f"{os_name(text)}"))]
def decorated(n): return lambda f: f
def os_name(x): return tokenizer.eos_token + path.join(x)
trainer = GRPOTrainer(model = model, reward_funcs = [judge, accuracy_reward])
trainer.train()
"#;
        let (text, absent) = functions(program, &["judge", "accuracy_reward"]).unwrap();
        assert_eq!(absent, ["tokenizer"]);
        for kept in [
            "import re, os", "trl.rewards", "START =", "pattern = re", "END: str", "def helper", "times = 0",
            "@decorated(\n  1)\ndef j", "def decorated", "def os_name",
        ] {
            assert!(text.contains(kept), "{kept}: {text}");
        }
        for left in ["unsloth", "from_pretrained", "apply_chat", "GRPOTrainer", "train()"] {
            assert!(!text.contains(left), "{left}: {text}");
        }
        assert!(functions(program, &["judge", "elsewhere"]).is_none());
    }
}
