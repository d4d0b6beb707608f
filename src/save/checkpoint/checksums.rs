//! `SHA256SUMS`: checksums of a checkpoint's files, in the format of coreutils, so that `sha256sum -c` can check them.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::util::files::hex;

pub(super) const SUMS_FILE: &str = "SHA256SUMS";

/// Writes the checksums of those of the `names` that are in the folder.
pub(super) fn write(folder: &Path, names: &[&str]) -> io::Result<()> {
    let mut sums = String::new();
    for name in names.iter().filter(|name| folder.join(name).exists()) {
        // Two spaces: coreutils' separator.
        sums.push_str(&format!("{}  {name}\n", sha256(&folder.join(name))?));
    }
    fs::write(folder.join(SUMS_FILE), sums)
}

/// Checks the files of a folder against their checksums. Files that are not among the `names`, from a file manager or the
/// user, have no checksum and are ignored. The error is text for the user.
pub(super) fn verify(folder: &Path, names: &[&str]) -> Result<(), String> {
    let sums = match fs::read_to_string(folder.join(SUMS_FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(format!("{SUMS_FILE} is missing")),
        sums => sums.map_err(|error| format!("{SUMS_FILE} cannot be read: {error}"))?,
    };
    if sums.is_empty() {
        return Err(format!("{SUMS_FILE} is empty"));
    }
    let mut listed = Vec::new();
    for line in sums.lines() {
        let Some((sum, name)) = line.split_once("  ").filter(|(sum, name)| sum.len() == 64 && !name.contains('/'))
        else {
            return Err(format!("{SUMS_FILE} is damaged"));
        };
        match sha256(&folder.join(name)) {
            Ok(found) if found == sum => listed.push(name),
            Ok(_) => return Err(format!("{name} is damaged: its SHA-256 is not the one in {SUMS_FILE}")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(format!("{name} is missing")),
            Err(error) => return Err(format!("{name} cannot be read: {error}")),
        }
    }
    // A list cut off at the end of a line still matches the files that it lists, so every file must be listed.
    match names.iter().find(|name| !listed.contains(name) && folder.join(name).exists()) {
        Some(name) => Err(format!("{SUMS_FILE} is damaged: it does not list {name}")),
        None => Ok(()),
    }
}

fn sha256(path: &Path) -> io::Result<String> {
    let mut hash = Sha256::new();
    io::copy(&mut File::open(path)?, &mut hash)?;
    Ok(hex(&hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_byte_of_every_file_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["a", "b"];
        let path = |name: &str| folder.path().join(name);
        fs::write(path("a"), "abc").unwrap();
        fs::write(path("b"), "").unwrap();
        write(folder.path(), &names).unwrap();
        // The example of FIPS 180-4.
        let sums = fs::read_to_string(path(SUMS_FILE)).unwrap();
        assert!(sums.starts_with("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  a\n"), "{sums}");
        assert_eq!(verify(folder.path(), &names), Ok(()));
        fs::write(path(".DS_Store"), "x").unwrap();
        fs::create_dir(path("notes")).unwrap();
        assert_eq!(verify(folder.path(), &names), Ok(()), "what is not the trainer's does no harm");
        for name in ["a", "b", SUMS_FILE] {
            let whole = fs::read(path(name)).unwrap();
            for index in 0..=whole.len() {
                let mut bytes = whole.clone();
                match bytes.get_mut(index) {
                    Some(byte) => *byte ^= 1,
                    None => bytes.push(b'x'),
                }
                fs::write(path(name), bytes).unwrap();
                assert!(verify(folder.path(), &names).is_err(), "byte {index} of {name}");
            }
            fs::remove_file(path(name)).unwrap();
            assert_eq!(verify(folder.path(), &names), Err(format!("{name} is missing")));
            fs::write(path(name), whole).unwrap();
        }
        // Cut off at the end of a line: every line that is left is correct.
        let first = sums.lines().next().unwrap();
        fs::write(path(SUMS_FILE), format!("{first}\n")).unwrap();
        assert_eq!(verify(folder.path(), &names), Err("SHA256SUMS is damaged: it does not list b".into()));
        fs::write(path(SUMS_FILE), "").unwrap();
        assert_eq!(verify(folder.path(), &names), Err("SHA256SUMS is empty".into()));
    }
}
