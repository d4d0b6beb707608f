//! GGUF files of a repository: which one is meant, and its head, which is enough where no weights are needed.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use hf_hub::{HFError, HFRepositorySync, repository::RepoTypeModel};
use indicatif::HumanBytes;

use super::HubError;
use super::repository::{RemoteFile, Repository, is_below};
use crate::schema::Problem;
use crate::util::gguf::{is_gguf, rope_factors_of_head};
use crate::util::text::lines;

/// Bytes of a request for a head: most heads, whose largest part is the vocabulary, come with one.
const BLOCK_BYTES: u64 = 8 << 20;

/// The file that `asked` stands for: its name, or the quantisation in its name. Without it, the only GGUF file of a
/// repository without safetensors; `None` where there is no GGUF file, or where there are safetensors.
pub(super) fn choose(id: &str, asked: Option<&str>, files: &[RemoteFile]) -> Result<Option<RemoteFile>, Problem> {
    let models: Vec<&RemoteFile> = files.iter().filter(|file| is_model(&file.name)).collect();
    let has_safetensors = files.iter().any(|file| file.name.ends_with(".safetensors") && !file.name.contains('/'));
    let found: Vec<&RemoteFile> = match asked {
        None if has_safetensors => return Ok(None),
        None => models.clone(),
        Some(asked) => models.iter().copied().filter(|file| is_meant(&file.name, asked)).collect(),
    };
    match found[..] {
        [] if asked.is_none() => Ok(None),
        [file] if !without_part(&file.name).1 => Ok(Some(file.clone())),
        _ => Err(refusal(id, asked, &found, &models)),
    }
}

/// Why those that were `found` among the `models` are not one model.
fn refusal(id: &str, asked: Option<&str>, found: &[&RemoteFile], models: &[&RemoteFile]) -> Problem {
    let asked = asked.unwrap_or_default();
    let list: Vec<String> =
        models.iter().map(|file| format!("  {}  {}", file.name, HumanBytes(file.num_bytes))).collect();
    let list = lines(&list);
    match found {
        [] if models.is_empty() => {
            Problem::new(format!("{id} has no GGUF models")).hint(format!("`{id}` alone names its safetensors"))
        }
        [] => {
            let meant = closest(asked, models).map(|name| format!("did you mean `{name}`? ")).unwrap_or_default();
            Problem::new(format!("{id} has no GGUF model `{asked}`")).hint(format!("{meant}It has{list}"))
        }
        [first, ..] if found.iter().all(|file| without_part(&file.name).1) => {
            let problem = Problem::new(format!("{id}/{} is a part of a model, and parts are not read", first.name));
            problem
                .hint("join them with llama.cpp: llama-gguf-split --merge FIRST.gguf WHOLE.gguf; or take a whole model")
        }
        [first, ..] => {
            let of = if asked.is_empty() { String::new() } else { format!(" of {asked}") };
            let problem = Problem::new(format!("{id} has {} GGUF models{of}", found.len()));
            problem.hint(format!("name one of them, such as `{id}/{}`:{list}", first.name))
        }
    }
}

/// Whether a file may be a model; the part that reads images and the statistics of a quantisation are none.
fn is_model(name: &str) -> bool {
    let is_other = ["mmproj", "imatrix"].iter().any(|other| name.to_lowercase().contains(other));
    is_gguf(Path::new(name)) && is_below(name) && !is_other
}

/// Whether `asked` is the name, or the word at the end of it, as `Q4_K_M` is of `name-Q4_K_M.gguf`.
fn is_meant(name: &str, asked: &str) -> bool {
    let (stem, asked_stem) = (without_part(name).0.to_lowercase(), asked.to_lowercase());
    let is_word = |before: &str| !before.ends_with(char::is_alphanumeric);
    name == asked || stem.strip_suffix(&asked_stem).is_some_and(is_word)
}

/// A name without `.gguf` and without `-00001-of-00003`, and whether it named a part.
fn without_part(name: &str) -> (&str, bool) {
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let is_number = |word: &str| word.bytes().all(|byte| byte.is_ascii_digit());
    match stem.rsplitn(4, '-').collect::<Vec<_>>()[..] {
        [count, "of", part, whole] if is_number(count) && is_number(part) => (whole, true),
        _ => (stem, false),
    }
}

/// The name that was probably meant.
fn closest<'a>(asked: &str, models: &[&'a RemoteFile]) -> Option<&'a str> {
    let likeness = |name: &str| strsim::normalized_damerau_levenshtein(asked, name);
    let names = models.iter().map(|file| (likeness(&file.name), file.name.as_str()));
    names.filter(|(likeness, _)| *likeness >= 0.6).max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, name)| name)
}

/// Where the head of a file is kept.
pub(super) fn head_path(repository: &Repository<'_>, commit: &str, name: &str) -> PathBuf {
    repository.folder().join("lora-train").join(commit).join(name)
}

/// Downloads what a file has before its tensors, and the tensors that belong to the shape, into a file of the same length
/// with a hole where the weights are.
pub(super) fn download_head(
    repository: &Repository<'_>,
    client: &HFRepositorySync<RepoTypeModel>,
    file: &RemoteFile,
    commit: &str,
) -> Result<PathBuf, HubError> {
    let path = head_path(repository, commit, &file.name);
    if fs::metadata(&path).is_ok_and(|found| found.len() == file.num_bytes) {
        return Ok(path);
    }
    let fetch = |range: Range<u64>| {
        let expected = range.end - range.start;
        let bytes = client.download_file_to_bytes().filename(&*file.name).revision(commit).range(range).send()?;
        let is_whole = bytes.len() as u64 == expected;
        let reason = || format!("{} bytes of {} for {expected}", bytes.len(), file.name);
        if is_whole { Ok(bytes) } else { Err(HFError::malformed_response(reason())) }
    };
    let fetch_at = |range: Range<u64>| fetch(range.clone()).map(|bytes| (range.start, bytes));
    let mut remote = Remote { fetch: &fetch, num_bytes: file.num_bytes, position: 0, known: Vec::new(), failure: None };
    let factors = rope_factors_of_head(&mut remote, file.num_bytes);
    let Remote { known, failure, .. } = remote;
    let factors = match failure {
        Some(error) => Err(error),
        None => factors.into_iter().filter(|range| range.end - range.start <= BLOCK_BYTES).map(fetch_at).collect(),
    };
    let factors: Vec<_> = factors.map_err(|error| repository.explain(error))?;
    write(&path, file.num_bytes, &known, &factors).map_err(|error| repository.cache_error(&error))?;
    Ok(path)
}

/// Writes a file of `num_bytes` that begins with `head` and has these bytes elsewhere.
fn write(path: &Path, num_bytes: u64, head: &[u8], elsewhere: &[(u64, Bytes)]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    for (place, bytes) in [(0, head)].into_iter().chain(elsewhere.iter().map(|(place, bytes)| (*place, &bytes[..]))) {
        file.seek(SeekFrom::Start(place))?;
        file.write_all(bytes)?;
    }
    file.as_file().set_len(num_bytes)?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// A file on the Hub, of which blocks are downloaded as they are read.
struct Remote<'a> {
    fetch: &'a dyn Fn(Range<u64>) -> Result<Bytes, HFError>,
    num_bytes: u64,
    position: u64,
    known: Vec<u8>,
    failure: Option<HFError>,
}

impl Read for Remote<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let end = self.num_bytes.min(self.position.saturating_add(to.len() as u64));
        while (self.known.len() as u64) < end {
            let start = self.known.len() as u64;
            match (self.fetch)(start..self.num_bytes.min(start + BLOCK_BYTES)) {
                Ok(bytes) => self.known.extend_from_slice(&bytes),
                Err(error) => {
                    self.failure = Some(error);
                    return Err(io::ErrorKind::Other.into());
                }
            }
        }
        let index = |place| usize::try_from(place).unwrap_or(usize::MAX);
        let from = self.known.get(index(self.position)..index(end)).unwrap_or_default();
        to[..from.len()].copy_from_slice(from);
        self.position += from.len() as u64;
        Ok(from.len())
    }
}

impl Seek for Remote<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(by) => self.num_bytes.checked_add_signed(by),
            SeekFrom::Current(by) => self.position.checked_add_signed(by),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::fixture::{Behaviour, COMMIT, Hub};
    use crate::hub::{AccessToken, HubSettings, Progress, Wanted, resolve};

    fn chosen(asked: Option<&str>, names: &[&str]) -> Result<Option<String>, String> {
        let file = |name: &&str| RemoteFile { name: (*name).to_owned(), num_bytes: 5 << 30 };
        let chosen = choose("o/n", asked, &names.iter().map(file).collect::<Vec<_>>());
        chosen.map(|file| file.map(|file| file.name)).map_err(|problem| problem.to_string())
    }

    #[test]
    fn a_file_is_meant_by_its_name_its_quantisation_or_by_being_the_only_one() {
        let names = [
            "config.json", "m-BF16.gguf", "m-F16.gguf", "m-Q4_K_M.gguf", "IQ1/m.IQ1_S.gguf", "mmproj-F16.gguf",
            "imatrix.gguf",
        ];
        for (asked, expected) in [
            ("m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
            ("q4_k_m", "m-Q4_K_M.gguf"),
            ("F16", "m-F16.gguf"),
            ("iq1_s", "IQ1/m.IQ1_S.gguf"),
        ] {
            assert_eq!(chosen(Some(asked), &names), Ok(Some(expected.into())), "{asked}");
        }
        assert_eq!(chosen(None, &["config.json", "a.gguf", "mmproj-F16.gguf"]), Ok(Some("a.gguf".into())));
        assert_eq!(chosen(None, &["model.safetensors", "a.gguf", "b.gguf"]), Ok(None));
        assert_eq!(chosen(None, &["README.md", "../a.gguf"]), Ok(None));
        assert_eq!(chosen(None, &["lora/adapter_model.safetensors", "a.gguf"]), Ok(Some("a.gguf".into())));
    }

    #[test]
    fn a_file_that_is_not_meant_by_anything_is_refused_with_those_that_are_there() {
        let names = ["m-Q4_K_M.gguf", "m-Q8_0.gguf"];
        let list = "\n    m-Q4_K_M.gguf  5.00 GiB\n    m-Q8_0.gguf  5.00 GiB";
        for (asked, expected) in [
            (None, "o/n has 2 GGUF models\n  hint: name one of them, such as `o/n/m-Q4_K_M.gguf`:"),
            (Some("Q4_K_S"), "o/n has no GGUF model `Q4_K_S`\n  hint: It has"),
            (Some("m-Q8.gguf"), "o/n has no GGUF model `m-Q8.gguf`\n  hint: did you mean `m-Q8_0.gguf`? It has"),
        ] {
            assert_eq!(chosen(asked, &names), Err(format!("{expected}{list}")));
        }
        let twice = chosen(Some("Q8_0"), &["a-Q8_0.gguf", "b-Q8_0.gguf"]).unwrap_err();
        assert!(twice.contains("o/n has 2 GGUF models of Q8_0\n"), "{twice}");
        let none = chosen(Some("Q8_0"), &["model.safetensors"]).unwrap_err();
        assert_eq!(none, "o/n has no GGUF models\n  hint: `o/n` alone names its safetensors");
        let parts = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"];
        for asked in [None, Some("Q8_0"), Some(parts[0])] {
            let error = chosen(asked, &parts).unwrap_err();
            assert!(error.contains("is a part of a model, and parts are not read\n  hint: join them"), "{error}");
        }
    }

    /// A file whose weights, of 10 MB, lie before the rotary factors.
    fn model() -> Vec<u8> {
        const NUMBERS: u64 = 2_500_000;
        let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let integers = |counts: &[u64]| counts.iter().flat_map(|count| count.to_le_bytes()).collect::<Vec<u8>>();
        let mut file = [b"GGUF", &3_u32.to_le_bytes()[..], &integers(&[3, 1])].concat();
        file.extend([text("general.architecture"), 8_u32.to_le_bytes().to_vec(), text("llama")].concat());
        for (name, len, place) in [
            ("blk.0.attn_q.weight", NUMBERS, 0),
            ("rope_factors_long.weight", 8, 4 * NUMBERS),
            ("rope_factors_short.weight", 4, 4 * NUMBERS + 32),
        ] {
            let one_dimension = [text(name), 1_u32.to_le_bytes().to_vec(), integers(&[len])].concat();
            file.extend([one_dimension, 0_u32.to_le_bytes().to_vec(), integers(&[place])].concat());
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.resize(file.len() + 4 * NUMBERS as usize, 1);
        file.extend((1..=12_u8).map(f32::from).flat_map(f32::to_le_bytes));
        file
    }

    fn served(names: &[&str]) -> (Hub, tempfile::TempDir, HubSettings) {
        let files = names.iter().map(|name| ((*name).to_owned(), model())).collect();
        let hub = Hub::start(Behaviour { files, ..Behaviour::default() });
        let cache = tempfile::tempdir().unwrap();
        let token = Some(AccessToken::new("hf_secret"));
        let settings =
            HubSettings { endpoint: hub.endpoint.clone(), cache: cache.path().to_owned(), token, offline: false };
        (hub, cache, settings)
    }

    #[test]
    fn one_file_is_downloaded_and_found_again_without_a_network() {
        let (hub, cache, settings) = served(&["m-Q4_0.gguf", "m-Q8_0.gguf", "big/m-F16.gguf", "tokenizer_config.json"]);
        let offline = HubSettings { offline: true, ..settings.clone() };
        let get = |asked: &str, settings| resolve(asked, None, Wanted::Model, settings, Progress::Quiet);
        let snapshot = cache.path().join("models--org--model/snapshots").join(COMMIT);
        for (asked, name) in [
            ("org/model/m-Q8_0.gguf", "m-Q8_0.gguf"),
            ("org/model:q8_0", "m-Q8_0.gguf"),
            ("org/model/big/m-F16.gguf", "big/m-F16.gguf"),
        ] {
            assert_eq!(get(asked, &settings).unwrap(), snapshot.join(name));
            assert_eq!(get(asked, &offline).unwrap(), snapshot.join(name));
            assert_eq!(fs::read(snapshot.join(name)).unwrap(), model());
        }
        assert!(!snapshot.join("m-Q4_0.gguf").exists() && !snapshot.join("tokenizer_config.json").exists());
        // Without the record of a choice, only a whole name says which file it is.
        for asked in ["org/model", "org/model:Q4_0"] {
            let error = get(asked, &offline).unwrap_err().to_string();
            assert!(error.contains(&format!("{asked} at `main` is not in")) || error.contains("lacks"), "{error}");
        }
        hub.change(|behaviour| behaviour.files.retain(|name, _| name == "m-Q8_0.gguf"));
        assert_eq!(get("org/model", &settings).unwrap(), snapshot.join("m-Q8_0.gguf"));
        assert_eq!(get("org/model", &offline).unwrap(), snapshot.join("m-Q8_0.gguf"));
    }

    #[test]
    fn without_weights_the_head_of_a_file_and_the_rotary_factors_are_downloaded() {
        let (hub, cache, settings) = served(&["m-Q8_0.gguf", "tokenizer.json", "tokenizer/a.json"]);
        let offline = HubSettings { offline: true, ..settings.clone() };
        let get = |wanted, settings| resolve("org/model", None, wanted, settings, Progress::Quiet);
        let head = get(Wanted::WithoutWeights, &settings).unwrap();
        assert!(head.starts_with(cache.path()) && head.with_file_name("tokenizer.json").is_file());
        let (found, whole) = (fs::read(&head).unwrap(), model());
        assert_eq!((found.len(), &found[..1 << 20]), (whole.len(), &whole[..1 << 20]));
        assert_eq!(found[found.len() - 48..], whole[whole.len() - 48..]);
        assert!(found[BLOCK_BYTES as usize..found.len() - 48].iter().all(|byte| *byte == 0));
        assert_eq!(get(Wanted::WithoutWeights, &offline).unwrap(), head);
        assert!(get(Wanted::Model, &offline).unwrap_err().to_string().contains("half-downloaded"));
        hub.take_seen();
        assert_eq!(get(Wanted::WithoutWeights, &settings).unwrap(), head);
        assert!(hub.take_seen().iter().all(|seen| seen.path.starts_with("/api/")));
        // Where the whole file is there, that is taken.
        let file = get(Wanted::Model, &settings).unwrap();
        assert_eq!(get(Wanted::WithoutWeights, &offline).unwrap(), file);
    }
}
