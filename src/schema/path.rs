//! Paths as people write them: `~`, `${VARIABLE}`.

use std::env;
use std::path::{Path, PathBuf};

use super::problem::Problem;
use super::suggest::closest;

/// Names of a folder that are compared: more take a while to list.
const MAX_COMPARED: usize = 10_000;

/// The path with a leading `~` and every `${VARIABLE}` replaced.
pub(super) fn expand(path: &str) -> Result<String, Problem> {
    if path.chars().any(char::is_control) {
        let problem = Problem::new("a path with a line end, a tab or the like in it");
        return Err(
            problem.hint(r"in double quotes `\n` and `\t` are such: write 'D:\new\table.jsonl' in single quotes")
        );
    }
    expand_with(path, |name| match name {
        "HOME" => env::home_dir().and_then(|home| home.into_os_string().into_string().ok()),
        _ => env::var(name).ok(),
    })
}

fn expand_with(path: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String, Problem> {
    let value = |name: &str| {
        let value = variable(name).filter(|value| !value.is_empty());
        value.ok_or_else(|| Problem::new(format!("the environment variable `{name}` is not set")))
    };
    let mut expanded = String::with_capacity(path.len());
    let mut rest = path;
    if let Some(after) = path.strip_prefix('~') {
        if !after.is_empty() && !after.starts_with('/') {
            let user = after.split('/').next().unwrap_or_default();
            let problem = Problem::new(format!("the home folder of `{user}` is not known here"));
            return Err(problem.hint("write the folder in full; `~` alone is your own"));
        }
        expanded = value("HOME")?;
        // The home folder may be `/`.
        rest = if expanded.ends_with('/') { after.trim_start_matches('/') } else { after };
    }
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        rest = after;
        if let Some(inside) = after.strip_prefix('{') {
            let Some((name, after)) = inside.split_once('}') else {
                return Err(Problem::new("`${` without `}`").hint("write ${VARIABLE}"));
            };
            expanded.push_str(&value(name)?);
            rest = after;
            continue;
        }
        let name: String = after.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        if !name.is_empty() && (expanded.is_empty() || expanded.ends_with('/')) {
            return Err(Problem::new(format!("`${name}` is not replaced")).hint(format!("write ${{{name}}}")));
        }
        expanded.push('$');
    }
    Ok(expanded + rest)
}

/// The folder in which a missing path was searched for: its nearest parent folder that exists.
#[must_use]
pub fn searched_folder(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    absolute.ancestors().skip(1).find(|folder| folder.is_dir()).unwrap_or(Path::new(".")).to_owned()
}

/// The path that was probably meant by one that is not there: with the name of its folder that is most similar to its
/// first missing part.
#[must_use]
pub fn near_path(path: &Path) -> Option<PathBuf> {
    let missing = path.ancestors().take_while(|part| !part.as_os_str().is_empty() && !part.exists()).last()?;
    let (folder, word) = (missing.parent()?, missing.file_name()?.to_str()?);
    let shown = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let entries = std::fs::read_dir(shown).ok()?.take(MAX_COMPARED).flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| !name.starts_with('.'));
    // An equal ending says nothing of how alike two names are.
    let ending = missing.extension().map_or_else(String::new, |ending| format!(".{}", ending.to_string_lossy()));
    let (alike, others): (Vec<String>, Vec<String>) = names.partition(|name| name.ends_with(&ending));
    let stem = word.strip_suffix(&ending).unwrap_or(word);
    let stems = alike.iter().filter_map(|name| name.strip_suffix(&ending));
    let near = closest(stem, stems).map(|stem| format!("{stem}{ending}"));
    let near = near.or_else(|| closest(word, others.iter().map(String::as_str)).map(str::to_owned))?;
    let rest = path.strip_prefix(missing).ok().filter(|rest| !rest.as_os_str().is_empty());
    let found = rest.map_or_else(|| folder.join(&near), |rest| folder.join(&near).join(rest));
    found.exists().then_some(found)
}

/// The hint for a missing path: the path that was probably meant.
#[must_use]
pub fn did_you_mean(path: &Path) -> Option<String> {
    near_path(path).map(|near| format!("did you mean `{}`?", near.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(path: &str) -> Result<String, String> {
        let variable = |name: &str| match name {
            "HOME" => Some("/home/me".to_owned()),
            "RUNS" => Some("/mnt/runs".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        expand_with(path, variable).map_err(|problem| problem.to_string())
    }

    #[test]
    fn the_home_folder_and_variables_are_replaced() {
        let cases = [
            ("~", "/home/me"),
            ("~/x", "/home/me/x"),
            ("${RUNS}/a-${HOME}", "/mnt/runs/a-/home/me"),
            ("a~/b~", "a~/b~"),
            ("cost-5$/a$b", "cost-5$/a$b"),
            ("rows/*.jsonl", "rows/*.jsonl"),
        ];
        for (path, expected) in cases {
            assert_eq!(expanded(path).as_deref(), Ok(expected), "{path}");
        }
    }

    #[test]
    fn what_cannot_be_replaced_is_refused() {
        let cases = [
            ("${NOPE}/x", "the environment variable `NOPE` is not set"),
            ("${EMPTY}/x", "the environment variable `EMPTY` is not set"),
            ("${RUNS/x", "`${` without `}`\n  hint: write ${VARIABLE}"),
            ("$RUNS/x", "`$RUNS` is not replaced\n  hint: write ${RUNS}"),
            ("a/$RUNS", "`$RUNS` is not replaced\n  hint: write ${RUNS}"),
            (
                "~you/x",
                "the home folder of `you` is not known here\n  hint: write the folder in full; `~` alone is your own",
            ),
        ];
        for (path, expected) in cases {
            assert_eq!(expanded(path), Err(expected.to_owned()), "{path}");
        }
    }

    #[test]
    fn a_path_of_windows_in_double_quotes_is_told_to_be_in_single_ones() {
        for path in ["D:\new\table.jsonl", "C:\runs\u{8}est", "a\r"] {
            let error = expand(path).unwrap_err().to_string();
            assert!(error.contains("single quotes"), "{error}");
        }
        assert!(expand(r"D:\new\table.jsonl").is_ok());
    }

    #[test]
    fn a_missing_path_is_looked_for_in_the_nearest_folder() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(searched_folder(&folder.path().join("a")), folder.path());
        assert_eq!(searched_folder(&folder.path().join("a/b/c")), folder.path());
        assert_eq!(searched_folder(Path::new("nope")), env::current_dir().unwrap());
    }

    #[test]
    fn a_missing_path_is_told_its_neighbour_of_a_similar_name() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir(root.join("quickstart")).unwrap();
        for name in ["train.jsonl", "eval.jsonl", "SmolLM2-135M", "lora.toml"] {
            std::fs::write(root.join("quickstart").join(name), "").unwrap();
        }
        for (missing, near) in [
            ("quickstart/trian.jsonl", Some("quickstart/train.jsonl")),
            ("quickstart/train.json", Some("quickstart/train.jsonl")),
            ("quikstart/eval.jsonl", Some("quickstart/eval.jsonl")),
            ("quickstart/smollm2-135m", Some("quickstart/SmolLM2-135M")),
            ("quikstart/absent.jsonl", None),
            ("quickstart/test.jsonl", None),
            ("quickstart/nope.toml", None),
        ] {
            assert_eq!(near_path(&root.join(missing)), near.map(|near| root.join(near)), "{missing}");
        }
        assert_eq!(near_path(Path::new("Cargo.tmol")), Some("Cargo.toml".into()));
        assert_eq!(near_path(Path::new("srx/schema.rs")), Some("src/schema.rs".into()));
    }
}
