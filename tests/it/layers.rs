//! Which modules may import which: a file uses only modules below its own, so that a change has one place.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// From top to bottom, as in `src/lib.rs`.
const LAYERS: [&str; 19] = [
    "commands", "run", "recipe", "train", "generate", "save", "insight", "data", "model", "lora", "ops", "images",
    "measure", "config", "spec", "device", "hub", "util", "schema",
];

fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The files of the program, each with the names of its module and its code without comments and unit tests.
fn modules() -> Vec<(Vec<String>, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    assert!(files.len() > 30, "found only {} files", files.len());
    let texts: Vec<_> = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let is_of_tests = |file: &Path| {
        let name = file.file_stem().unwrap().to_str().unwrap();
        let declared = [format!("#[cfg(test)]\nmod {name};"), format!("#[cfg(test)]\npub(crate) mod {name};")];
        texts.iter().any(|text| declared.iter().any(|declared| text.contains(declared)))
    };
    let code = |text: &str| -> String {
        let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
        let lines = text.split_inclusive('\n').filter(|line| !line.trim_start().starts_with("//"));
        lines.collect()
    };
    let names = |file: &Path| {
        let path = file.strip_prefix(&root).unwrap().with_extension("");
        path.iter().map(|name| name.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let modules = files.iter().zip(&texts).filter(|(file, _)| !is_of_tests(file));
    let modules = modules.map(|(file, text)| (names(file), code(text)));
    modules.filter(|(names, _)| *names != ["lib"] && *names != ["main"]).collect()
}

/// Finds the paths at the start of `text`, one for each name of a group in braces; returns what follows them.
fn paths<'a>(text: &'a str, before: &[&'a str], found: &mut Vec<Vec<&'a str>>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = paths(rest, before, found).trim_start_matches(|c| c != ',' && c != '}');
            match rest.strip_prefix(',') {
                Some(next) => rest = next,
                None => return rest.strip_prefix('}').unwrap_or_default(),
            }
        }
    }
    let (name, rest) = text.split_at(text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len()));
    let path = [before, &[name]].concat();
    match rest.strip_prefix("::") {
        Some(rest) => paths(rest, &path, found),
        None => {
            found.push(path);
            rest
        }
    }
}

/// The paths in the code of a module, from the root of the crate; those of `pub use` apart.
fn paths_from_root<'a>(module: &'a [String], code: &'a str, all: &[(Vec<String>, String)]) -> [Vec<Vec<&'a str>>; 2] {
    let mut found = [Vec::new(), Vec::new()];
    let is_of_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let mut rest = code;
    while let Some(at) = rest.find("::") {
        let start = rest[..at].rfind(|c| !is_of_name(c)).map_or(0, |before| before + 1);
        let statement = rest[..start].rsplit([';', '}']).next().unwrap_or_default().trim();
        // A path in a macro is used where the macro is.
        let is_of_macro = statement.ends_with('$');
        let is_passed_on = statement.starts_with("pub") && statement.ends_with("use");
        let mut here = Vec::new();
        rest = paths(&rest[start..], &[], &mut here);
        for path in here.into_iter().filter(|_| !is_of_macro) {
            let climbs = path.iter().take_while(|name| **name == "super").count();
            let own = || module.iter().map(String::as_str);
            let from_root: Vec<_> = match path[0] {
                "crate" => path[1..].to_vec(),
                "self" => own().chain(path[1..].iter().copied()).collect(),
                "super" => {
                    own().take(module.len().saturating_sub(climbs)).chain(path[climbs..].iter().copied()).collect()
                }
                child if all.iter().any(|(names, _)| names.split_last() == Some((&child.to_owned(), module))) => {
                    own().chain(path.iter().copied()).collect()
                }
                _ => continue,
            };
            found[usize::from(is_passed_on)].push(from_root);
        }
    }
    found
}

/// Which file uses which, by their places in `modules`; what a file passes on is used where it is defined.
fn uses(modules: &[(Vec<String>, String)]) -> Vec<(usize, usize)> {
    let paths: Vec<_> = modules.iter().map(|(module, code)| paths_from_root(module, code, modules)).collect();
    let passed_on = |path: &[&str]| {
        let (name, module) = path.split_last()?;
        let index = modules.iter().position(|(names, _)| names == module)?;
        paths[index][1].iter().find(|passed_on| passed_on.last() == Some(name)).cloned()
    };
    let defined_in = |path: &[&str]| {
        let end = (1..=path.len()).find_map(|end| Some((end, passed_on(&path[..end])?)));
        let path = end.map_or(path.to_vec(), |(end, to)| [&to, &path[end..]].concat());
        (1..=path.len()).rev().find_map(|end| modules.iter().position(|(names, _)| *names == path[..end]))
    };
    let mut uses = Vec::new();
    for (from, here) in paths.iter().enumerate() {
        // `crate::{` and `super::*` name nothing further.
        for path in here.iter().flatten() {
            let named: Vec<_> = path.iter().copied().filter(|name| !name.is_empty()).collect();
            uses.extend(defined_in(&named).map(|to| (from, to)));
        }
    }
    uses
}

#[test]
fn a_file_uses_only_modules_below_its_own() {
    let modules = modules();
    let layer = |index: usize| {
        let room = &modules[index].0[0];
        LAYERS.iter().position(|layer| layer == room).unwrap_or_else(|| panic!("{room} is in no layer"))
    };
    let name = |index: usize| modules[index].0.join("::");
    let climbs = uses(&modules).into_iter().filter(|&(from, to)| layer(to) < layer(from));
    let wrong: Vec<_> = climbs.map(|(from, to)| format!("{} uses {}", name(from), name(to))).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_files_use_each_other_in_a_circle() {
    let modules = modules();
    let name = |index: usize| modules[index].0.join("::");
    // A file and the files of its folder are one.
    let is_apart = |from: usize, to: usize| {
        let [from, to] = [from, to].map(|index| &modules[index].0);
        !from.starts_with(to) && !to.starts_with(from)
    };
    let uses: Vec<_> = uses(&modules).into_iter().filter(|&(from, to)| is_apart(from, to)).collect();
    let reached_from = |start: usize| {
        let (mut reached, mut next) = (HashSet::new(), vec![start]);
        while let Some(at) = next.pop() {
            next.extend(
                uses.iter().filter(|(from, _)| *from == at).map(|(_, to)| *to).filter(|to| reached.insert(*to)),
            );
        }
        reached
    };
    let in_a_circle: Vec<_> =
        (0..modules.len()).filter(|&start| reached_from(start).contains(&start)).map(name).collect();
    assert!(in_a_circle.is_empty(), "{}", in_a_circle.join("\n"));
}

#[test]
fn only_the_device_module_asks_for_a_backend_feature() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    for file in files {
        let path = file.strip_prefix(&root).unwrap().to_owned();
        let text = fs::read_to_string(&file).unwrap();
        for backend in ["cuda", "vulkan", "metal", "rocm"] {
            let asks = text.contains(&format!("feature = \"{backend}\""));
            assert!(!asks || path.starts_with("device") || path == Path::new("device.rs"), "{}", path.display());
        }
    }
}
