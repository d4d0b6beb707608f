//! TensorBoard event files.
//!
//! Records are made with tensorboard-rs and its event types, but written here: its own `SummaryWriter` unwraps every
//! I/O error on its own thread and panics at the next call, so a full disk would end the run.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use protobuf::{Message, RepeatedField};
use tensorboard_proto::event::{Event, SessionLog, SessionLog_SessionStatus};
use tensorboard_proto::summary::{Summary, Summary_Value, SummaryMetadata, SummaryMetadata_PluginData};
use tensorboard_proto::tensor::TensorProto;
use tensorboard_proto::tensor_shape::{TensorShapeProto, TensorShapeProto_Dim};
use tensorboard_proto::types::DataType;
use tensorboard_rs::record_writer::RecordWriter;
use tensorboard_rs::summary;

use super::append::AppendLog;
use super::sinks::LogFile;
use super::tags;

/// One event file of a run. A resumed run writes another one beside it.
#[derive(Debug)]
pub(super) struct TensorBoard {
    log: AppendLog,
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
    ///
    /// # Errors
    ///
    /// If the folder or the file cannot be created or written.
    pub(super) fn open(folder: &Path, resume_step: Option<u64>) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let mut version = Event::new();
        version.set_file_version("brain.Event:2".into());
        let mut header = record(version, 0)?;
        header.extend(record(layout_event(), 0)?);
        let mut file = Self { log: create_event_file(folder, &header)?, described: HashSet::new() };
        if let Some(step) = resume_step {
            let mut session = SessionLog::new();
            session.set_status(SessionLog_SessionStatus::START);
            let mut event = Event::new();
            event.set_session_log(session);
            file.write(event, step + 1)?;
        }
        Ok(file)
    }

    /// Writes the figures of a step, by tag; the first figure of each tag comes with its description.
    ///
    /// # Errors
    ///
    /// If the record cannot be written whole; the file then ends with the previous record.
    pub(super) fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) -> io::Result<()> {
        if scalars.is_empty() {
            return Ok(());
        }
        #[allow(clippy::cast_possible_truncation, reason = "TensorBoard stores f32")]
        let values = scalars.iter().flat_map(|&(tag, value)| summary::scalar(tag, value as f32).take_value());
        let mut values: Vec<Summary_Value> = values.collect();
        let is_new = |value: &Summary_Value| !self.described.contains(value.get_tag());
        let new: Vec<String> =
            values.iter().filter(|value| is_new(value)).map(|value| value.get_tag().to_owned()).collect();
        for value in values.iter_mut().filter(|value| new.iter().any(|tag| tag == value.get_tag())) {
            let metadata = scalar_metadata(value.get_tag());
            value.set_metadata(metadata);
        }
        self.summary(step, values)?;
        self.described.extend(new);
        Ok(())
    }

    /// Writes a text, shown as Markdown.
    ///
    /// # Errors
    ///
    /// As [`Self::scalars`].
    pub(super) fn text(&mut self, step: u64, tag: &str, markdown: &str) -> io::Result<()> {
        self.summary(step, vec![string_value(tag, "text", markdown.as_bytes(), &[1])])
    }

    fn summary(&mut self, step: u64, values: Vec<Summary_Value>) -> io::Result<()> {
        let mut summary = Summary::new();
        summary.set_value(RepeatedField::from_vec(values));
        let mut event = Event::new();
        event.set_summary(summary);
        self.write(event, step)
    }

    fn write(&mut self, event: Event, step: u64) -> io::Result<()> {
        self.log.append(&record(event, step)?)
    }
}

impl LogFile for TensorBoard {
    fn log(&mut self) -> &mut AppendLog {
        &mut self.log
    }
}

fn metadata(plugin_name: &str) -> SummaryMetadata {
    let mut plugin = SummaryMetadata_PluginData::new();
    plugin.set_plugin_name(plugin_name.into());
    let mut metadata = SummaryMetadata::new();
    metadata.set_plugin_data(plugin);
    metadata
}

fn scalar_metadata(tag: &str) -> SummaryMetadata {
    let mut metadata = metadata("scalars");
    metadata.set_display_name(tag.into());
    metadata.set_summary_description(tags::description(tag).unwrap_or_default().into());
    metadata.mut_unknown_fields().add_varint(DATA_CLASS_FIELD, DATA_CLASS_SCALAR);
    metadata
}

/// Bytes for one of TensorBoard's plugins.
fn string_value(tag: &str, plugin_name: &str, bytes: &[u8], shape: &[i64]) -> Summary_Value {
    let dims = shape.iter().map(|&size| {
        let mut dim = TensorShapeProto_Dim::new();
        dim.set_size(size);
        dim
    });
    let mut tensor_shape = TensorShapeProto::new();
    tensor_shape.set_dim(dims.collect::<Vec<_>>().into());
    let mut tensor = TensorProto::new();
    tensor.set_dtype(DataType::DT_STRING);
    tensor.set_tensor_shape(tensor_shape);
    tensor.set_string_val(RepeatedField::from_vec(vec![bytes.to_vec()]));
    let mut value = Summary_Value::new();
    value.set_tag(tag.into());
    value.set_metadata(metadata(plugin_name));
    value.set_tensor(tensor);
    value
}

/// The layout of the custom scalars tab: figures that belong together in one chart.
fn layout_event() -> Event {
    let mut summary = Summary::new();
    let layout = tags::layout();
    summary.set_value(vec![string_value("custom_scalars__config__", "custom_scalars", &layout, &[])].into());
    let mut event = Event::new();
    event.set_summary(summary);
    event
}

/// Length, checksum, event, checksum: in memory first, so that the file gets it in one piece.
fn record(mut event: Event, step: u64) -> io::Result<Vec<u8>> {
    event.set_wall_time(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()));
    event.set_step(i64::try_from(step).unwrap_or(i64::MAX));
    let mut record = Vec::new();
    RecordWriter::new(&mut record).write(&event.write_to_bytes()?)?;
    Ok(record)
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
        match AppendLog::create_new(&name(n), header.to_owned()) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && n < 1000 => n += 1,
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::tagged_scalars;
    use crate::figures::tests::full_step;
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
        tensorboard.scalars(3, &scalars).unwrap();
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
            tensorboard.scalars(step, &[("time/step", 0.5)]).unwrap();
        }
        tensorboard.scalars(3, &[("time/step", 0.5), ("eval/loss", 2.0)]).unwrap();
        let events = read(&only_file(folder.path()));
        let described = |event: &Event| -> Vec<bool> {
            let values = event.get_summary().get_value().iter();
            values.map(|value| !value.get_metadata().get_summary_description().is_empty()).collect()
        };
        let all: Vec<_> = events[2..].iter().map(described).collect();
        assert_eq!(all, [vec![true], vec![false], vec![false, true]]);
        let metadata = events[2].get_summary().get_value()[0].get_metadata();
        assert!(metadata.get_summary_description().contains("Seconds"));
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

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_error_not_a_panic() {
        let mut tensorboard =
            TensorBoard { log: AppendLog::open(Path::new("/dev/full")).unwrap(), described: HashSet::new() };
        let error = tensorboard.scalars(1, &[("train/loss", 1.0)]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        // Every later step tries again.
        assert!(tensorboard.scalars(2, &[("train/loss", 1.0)]).is_err());
    }
}
