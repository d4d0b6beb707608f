//! TensorBoard event files.
//!
//! Records are made with tensorboard-rs and its event types, but written here: its own `SummaryWriter` unwraps every
//! I/O error on its own thread and panics at the next call, so a full disk would end the run.

mod hparams;
mod layout;

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::{Message, SingularPtrField};
use tensorboard_proto::event::{Event, SessionLog, SessionLog_SessionStatus};
use tensorboard_proto::summary::{Summary, Summary_Value, SummaryMetadata, SummaryMetadata_PluginData};
use tensorboard_proto::tensor::TensorProto;
use tensorboard_proto::tensor_shape::{TensorShapeProto, TensorShapeProto_Dim};
use tensorboard_proto::types::DataType;
use tensorboard_rs::record_writer::RecordWriter;

use super::append::AppendLog;
use crate::measure::figures::tags;

/// One event file of a run. A resumed run writes another one beside it.
#[derive(Debug)]
pub(super) struct TensorBoard {
    pub(super) log: AppendLog,
    /// Tags that the file already describes.
    described: HashSet<String>,
}

/// `DataClass::DATA_CLASS_SCALAR`, and the number of its field in `SummaryMetadata`: newer than tensorboard-proto.
/// Without it TensorBoard's fast loader forgets descriptions.
const DATA_CLASS_FIELD: u32 = 4;
const DATA_CLASS_SCALAR: u64 = 1;

impl TensorBoard {
    /// Creates an event file, and its folder, with the layout of the custom scalars tab. With `resume_step`,
    /// TensorBoard is asked to forget what older files hold after that step.
    pub(super) fn open(folder: &Path, resume_step: Option<u64>) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let mut version = Event::new();
        version.set_file_version("brain.Event:2".into());
        let layout = layout::layout().write_to_bytes().unwrap_or_default();
        let layout = string_value("custom_scalars__config__", "custom_scalars", layout, &[]);
        let header = [record(version, 0), record(summary(vec![layout]), 0)].concat();
        let mut log = create_event_file(folder, &header)?;
        if let Some(step) = resume_step {
            let mut event = Event::new();
            let status = SessionLog_SessionStatus::START;
            event.set_session_log(SessionLog { status, ..SessionLog::default() });
            if let Some(warning) = log.append(record(event, step + 1)) {
                return Err(io::Error::other(warning));
            }
        }
        Ok(Self { log, described: HashSet::new() })
    }

    /// Writes the figures of a step, by tag; the first figure of each tag comes with its description. Returns a warning,
    /// as [`AppendLog::append`] does.
    pub(super) fn scalars(&mut self, step: u64, scalars: &[(impl AsRef<str>, f64)]) -> Option<String> {
        if scalars.is_empty() {
            return None;
        }
        let mut value = |(tag, number): (&str, f64)| {
            let mut value = Summary_Value { tag: tag.into(), ..Summary_Value::default() };
            #[allow(clippy::cast_possible_truncation, reason = "TensorBoard stores f32")]
            value.set_simple_value(number as f32);
            if self.described.insert(tag.to_owned()) {
                value.set_metadata(scalar_metadata(tag));
            }
            value
        };
        let values = scalars.iter().map(|(tag, number)| value((tag.as_ref(), *number))).collect();
        self.log.append(record(summary(values), step))
    }

    /// Writes the recipe of the steps after `step`. Returns a warning, as [`AppendLog::append`] does.
    pub(super) fn recipe(&mut self, step: u64, toml: &str) -> Option<String> {
        let text = self.text(step, "recipe", &format!("```toml\n{toml}\n```"));
        text.or(self.log.append(record(summary(vec![hparams::start(toml)]), step)))
    }

    /// Writes that the run has ended. Returns a warning, as [`AppendLog::append`] does.
    pub(super) fn end(&mut self, step: u64, is_finished: bool) -> Option<String> {
        self.log.append(record(summary(vec![hparams::end(is_finished)]), step))
    }

    /// Writes a text, shown as Markdown. Returns a warning, as [`AppendLog::append`] does.
    pub(super) fn text(&mut self, step: u64, tag: &str, markdown: &str) -> Option<String> {
        self.log.append(record(summary(vec![string_value(tag, "text", markdown.into(), &[1])]), step))
    }
}

fn summary(values: Vec<Summary_Value>) -> Event {
    let mut event = Event::new();
    event.set_summary(Summary { value: values.into(), ..Summary::default() });
    event
}

fn metadata(plugin_name: &str) -> SummaryMetadata {
    let plugin =
        SummaryMetadata_PluginData { plugin_name: plugin_name.into(), ..SummaryMetadata_PluginData::default() };
    SummaryMetadata { plugin_data: SingularPtrField::some(plugin), ..SummaryMetadata::default() }
}

fn scalar_metadata(tag: &str) -> SummaryMetadata {
    let description = tags().find(|(_, known, _)| *known == tag).map(|(.., sentence)| sentence);
    let mut metadata = metadata("scalars");
    metadata.display_name = tag.into();
    metadata.summary_description = description.unwrap_or_default().into();
    metadata.unknown_fields.add_varint(DATA_CLASS_FIELD, DATA_CLASS_SCALAR);
    metadata
}

/// Bytes for one of TensorBoard's plugins.
fn string_value(tag: &str, plugin_name: &str, bytes: Vec<u8>, shape: &[i64]) -> Summary_Value {
    let dim = shape.iter().map(|&size| TensorShapeProto_Dim { size, ..TensorShapeProto_Dim::default() });
    let mut value = Summary_Value { tag: tag.into(), ..Summary_Value::default() };
    value.set_metadata(metadata(plugin_name));
    value.set_tensor(TensorProto {
        dtype: DataType::DT_STRING,
        tensor_shape: SingularPtrField::some(TensorShapeProto { dim: dim.collect(), ..TensorShapeProto::default() }),
        string_val: vec![bytes].into(),
        ..TensorProto::default()
    });
    value
}

/// Length, checksum, event, checksum: in memory first, so that the file gets it in one piece.
fn record(mut event: Event, step: u64) -> Vec<u8> {
    event.set_wall_time(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()));
    event.set_step(i64::try_from(step).unwrap_or(i64::MAX));
    let mut record = Vec::new();
    // Encoding and writing in memory do not fail.
    drop(RecordWriter::new(&mut record).write(&event.write_to_bytes().unwrap_or_default()));
    record
}

/// The latest time in the names of the existing event files.
fn latest_seconds(folder: &Path) -> Option<u64> {
    let names = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.file_name());
    let seconds = |name: std::ffi::OsString| {
        name.to_str()?.strip_prefix("events.out.tfevents.")?.split('.').next()?.parse::<u64>().ok()
    };
    // A file of another program may say anything.
    names.filter_map(seconds).filter(|seconds| *seconds < 9_999_999_999).max()
}

/// `events.out.tfevents.<seconds>.<host>.<process>.<n>`: TensorBoard reads the files of a run in the order of their
/// names, so the file of a resumed run must come after those of the earlier starts.
fn create_event_file(folder: &Path, header: &[u8]) -> io::Result<AppendLog> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    // Two starts within a second, or a clock that was set back, must not change the order.
    let seconds = latest_seconds(folder).map_or(now, |latest| now.max(latest + 1));
    let host = sysinfo::System::host_name().unwrap_or_else(|| "localhost".into()).replace(['/', '\\'], "-");
    let process = std::process::id();
    let name = |n: u32| -> PathBuf { folder.join(format!("events.out.tfevents.{seconds:010}.{host}.{process}.{n}")) };
    let mut n = 0;
    loop {
        match AppendLog::create_new("tensorboard", &name(n), header.to_owned()) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && n < 1000 => n += 1,
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::figures::tagged_scalars;
    use crate::measure::figures::tests::full_step;
    use tensorboard_rs::masked_crc32c::masked_crc32c;

    /// Reads the events of a file and checks every length and checksum.
    fn read(path: &Path) -> Vec<Event> {
        let bytes = std::fs::read(path).unwrap();
        let mut rest = bytes.as_slice();
        let mut events = Vec::new();
        while !rest.is_empty() {
            let crc = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
            let length = usize::try_from(u64::from_le_bytes(rest[..8].try_into().unwrap())).unwrap();
            assert_eq!(crc(&rest[8..]), masked_crc32c(&rest[..8]));
            let data = &rest[12..12 + length];
            assert_eq!(crc(&rest[12 + length..]), masked_crc32c(data));
            events.push(Event::parse_from_bytes(data).unwrap());
            rest = &rest[16 + length..];
        }
        events
    }

    fn only_file(folder: &Path) -> PathBuf {
        let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 1);
        files.remove(0)
    }

    #[test]
    fn a_step_is_one_record_with_every_tag_and_value() {
        let folder = tempfile::tempdir().unwrap();
        let mut tensorboard = TensorBoard::open(folder.path(), None).unwrap();
        let scalars = tagged_scalars(&full_step(3));
        assert_eq!(tensorboard.scalars(3, &scalars), None);
        let path = only_file(folder.path());
        assert!(path.file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."));
        let events = read(&path);
        assert_eq!(events.len(), 3);
        assert_eq!(events[0].get_file_version(), "brain.Event:2");
        assert_eq!(events[1].get_summary().get_value()[0].get_tag(), "custom_scalars__config__");
        assert_eq!(events[2].get_step(), 3);
        let written: Vec<_> = events[2]
            .get_summary()
            .get_value()
            .iter()
            .map(|value| (value.get_tag(), value.get_simple_value()))
            .collect();
        assert_eq!(written.len(), scalars.len());
        for ((tag, value), (expected_tag, expected)) in written.into_iter().zip(scalars) {
            assert_eq!(tag, expected_tag);
            assert!((f64::from(value) - expected).abs() <= 1e-6 * expected.abs(), "{tag}: {value}");
        }
    }

    #[test]
    fn a_resumed_run_tells_tensorboard_from_which_step_on_older_files_are_void() {
        let folder = tempfile::tempdir().unwrap();
        TensorBoard::open(folder.path(), Some(500)).unwrap();
        let events = read(&only_file(folder.path()));
        assert_eq!(events[2].get_session_log().get_status(), SessionLog_SessionStatus::START);
        assert_eq!(events[2].get_step(), 501);
    }

    #[test]
    fn the_first_value_of_a_tag_says_what_it_is_and_the_later_ones_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut tensorboard = TensorBoard::open(folder.path(), None).unwrap();
        for step in 1..=2 {
            tensorboard.scalars(step, &[("time/step", 0.5)]);
        }
        tensorboard.scalars(3, &[("time/step", 0.5), ("eval/loss", 2.0)]);
        let events = read(&only_file(folder.path()));
        let described = |event: &Event| -> Vec<bool> {
            let values = event.get_summary().get_value().iter();
            values.map(|value| !value.get_metadata().get_summary_description().is_empty()).collect()
        };
        let all: Vec<_> = events[2..].iter().map(described).collect();
        assert_eq!(all, [vec![true], vec![false], vec![false, true]]);
        let metadata = events[2].get_summary().get_value()[0].get_metadata();
        assert!(metadata.get_summary_description().contains("Seconds"));
        assert!(tags().all(|(.., sentence)| sentence.ends_with('.')));
    }

    #[test]
    fn files_of_one_second_do_not_collide_and_are_read_in_the_order_of_their_starts() {
        let folder = tempfile::tempdir().unwrap();
        let mut names = std::collections::BTreeSet::new();
        for start in 0..12 {
            TensorBoard::open(folder.path(), Some(start)).unwrap();
            let now: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
            let new = now.into_iter().max().unwrap();
            assert!(names.insert(new), "the newest comes last by name");
        }
    }
}
