//! Gives the program the pages of docs/, and tells it which commit it is built from: `LORA_TRAIN_GIT_COMMIT`, where it is
//! not set already.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

/// Pages that are not for users: how the project is built, and what was measured.
const OTHER_PAGES: [&str; 2] = ["house", "benchmarks"];

fn main() -> io::Result<()> {
    write_pages()?;
    name_commit();
    Ok(())
}

/// Writes a list of the pages' names and texts.
fn write_pages() -> io::Result<()> {
    // Where it is now: another checkout may have compiled this.
    let folder = env::current_dir()?.join("docs");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    paths.sort();
    let name = |path: &Path| Some(path.file_name()?.to_str()?.strip_suffix(".md")?.to_owned());
    let pages = paths.iter().filter_map(|path| Some((name(path)?, path.to_str()?)));
    let pages = pages.filter(|(name, _)| !OTHER_PAGES.contains(&&**name));
    let list: String = pages.map(|(name, path)| format!("({name:?}, include_str!({path:?})),\n")).collect();
    let out = env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("OUT_DIR is not set"))?;
    fs::write(Path::new(&out).join("pages.rs"), format!("&[{list}]"))
}

fn name_commit() {
    println!("cargo::rerun-if-env-changed=LORA_TRAIN_GIT_COMMIT");
    if env::var_os("LORA_TRAIN_GIT_COMMIT").is_some() {
        return;
    }
    // Without git or outside a repository nothing is set, and the program says nothing about its commit.
    let Some(commit) = git(&["rev-parse", "HEAD"]) else { return };
    println!("cargo::rustc-env=LORA_TRAIN_GIT_COMMIT={commit}");
    // What changes with every commit, checkout and reset.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists()) {
        println!("cargo::rerun-if-changed={log}");
    }
}

/// First line that git prints.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.lines().next()?.to_owned())
}
