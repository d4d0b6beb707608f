//! Paths as people write them: `~`, `${VARIABLE}`.

use std::env;
use std::path::{Path, PathBuf};

use super::problem::Problem;

/// The path with a leading `~` and every `${VARIABLE}` replaced.
pub(super) fn expand(path: &str) -> Result<String, Problem> {
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
    fn a_missing_path_is_looked_for_in_the_nearest_folder() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(searched_folder(&folder.path().join("a")), folder.path());
        assert_eq!(searched_folder(&folder.path().join("a/b/c")), folder.path());
        assert_eq!(searched_folder(Path::new("nope")), env::current_dir().unwrap());
    }
}
