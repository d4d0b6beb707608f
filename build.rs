//! Tells the program which commit it is built from: `LORA_TRAIN_GIT_COMMIT`, where it is not set already.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=LORA_TRAIN_GIT_COMMIT");
    if std::env::var_os("LORA_TRAIN_GIT_COMMIT").is_some() {
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
