//! Images at web addresses that the rows of a file name: fetched many at a time, before the rows are encoded.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use crate::data::encode::Encoder;
use crate::data::error::DataError;
use crate::data::files::OpenOptions;
use crate::data::formats::RowFormat;
use crate::data::progress::{Meter, Work};
use crate::data::rows::RowFile;
use crate::images::{is_image, is_web};

/// How many are fetched at a time.
const NUM_THREADS: usize = 16;

/// Fetches the images of the first rows into the cache. Those that cannot be fetched are errors of their rows, which ask for them again.
pub(super) fn fetch_images(
    (file, path, num_rows): (&RowFile, &Path, usize),
    format: &RowFormat,
    encoder: &Encoder<'_>,
    options: &OpenOptions<'_>,
) -> Result<(), DataError> {
    let Some(web) = encoder.images.and_then(|images| images.web()) else { return Ok(()) };
    let mut addresses = BTreeSet::new();
    for row in 0..num_rows {
        let bytes = file.bytes(row)?;
        // Others need not be read twice.
        if bytes.windows(4).any(|four| four == b"http") {
            let sample = file.parse(&bytes).and_then(|row| format.read(&row, encoder.template));
            let images = sample.iter().flat_map(|sample| sample.images());
            addresses.extend(images.filter(|image| is_web(image)).map(str::to_owned));
        }
    }
    let addresses: Vec<String> = addresses.into_iter().collect();
    let mut meter = Meter::start(options.progress, Work::Fetching, path.display().to_string(), addresses.len());
    let (next, (fetched, counted)) = (AtomicUsize::new(0), mpsc::channel());
    std::thread::scope(|scope| {
        for _ in 0..NUM_THREADS.min(addresses.len()) {
            let (fetched, next, addresses) = (fetched.clone(), &next, &addresses);
            scope.spawn(move || {
                while let Some(address) = addresses.get(next.fetch_add(1, Ordering::Relaxed))
                    && !(options.is_stopped)()
                {
                    drop(web.get(address, is_image));
                    if fetched.send(()).is_err() {
                        break;
                    }
                }
            });
        }
        drop(fetched);
        for (count, ()) in (1..).zip(counted) {
            meter.advance(count);
        }
    });
    meter.finish();
    if (options.is_stopped)() { Err(DataError::Interrupted) } else { Ok(()) }
}
