//! What TensorBoard shows of a run, once it has dropped the steps that a resumed run wrote again.

use std::fs;
use std::path::{Path, PathBuf};

use protobuf::Message;
use tensorboard_proto::event::{Event, SessionLog_SessionStatus};

/// The events of a file. A killed process may have left a torn one at the end.
fn read(path: &Path) -> Vec<Event> {
    let bytes = fs::read(path).unwrap();
    let mut rest = bytes.as_slice();
    let mut events = Vec::new();
    // Length (8 bytes), checksum (4), event, checksum (4).
    while let Some(length) = rest.get(..8) {
        let length = usize::try_from(u64::from_le_bytes(length.try_into().unwrap())).unwrap();
        let Some(data) = rest.get(12..12 + length).filter(|_| rest.len() >= 16 + length) else { break };
        events.push(Event::parse_from_bytes(data).unwrap());
        rest = &rest[16 + length..];
    }
    events
}

/// Steps and bits of the values of `train/loss`.
pub(crate) fn losses(run_dir: &Path) -> Vec<(i64, u32)> {
    values(run_dir, "train/loss").into_iter().map(|(step, value)| (step, value.to_bits())).collect()
}

/// Steps and values of a tag in TensorBoard's drawing order: files by name. A session start drops what older files hold
/// from its step on.
pub(crate) fn values(run_dir: &Path, tag: &str) -> Vec<(i64, f32)> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(run_dir.join("tensorboard")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut points: Vec<(i64, f32)> = Vec::new();
    for event in files.iter().flat_map(|file| read(file)) {
        if event.has_session_log() && event.get_session_log().get_status() == SessionLog_SessionStatus::START {
            points.retain(|(step, _)| *step < event.get_step());
        }
        let values = event.get_summary().get_value().iter().filter(|value| value.get_tag() == tag);
        points.extend(values.map(|value| (event.get_step(), value.get_simple_value())));
    }
    points
}

/// Steps and tags of all texts, in file order.
pub(crate) fn texts(run_dir: &Path) -> Vec<(i64, String)> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(run_dir.join("tensorboard")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut texts = Vec::new();
    for event in files.iter().flat_map(|file| read(file)) {
        let values = event.get_summary().get_value().iter().filter(|value| value.has_tensor());
        texts.extend(values.map(|value| (event.get_step(), value.get_tag().to_owned())));
    }
    texts
}
