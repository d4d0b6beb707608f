//! The bodies of requests, as large as they may be.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use futures_util::StreamExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::ApiError;

/// Longest body.
const MAX_BYTES: usize = 2 << 20;
/// The same where the model sees images.
const MAX_BYTES_WITH_IMAGES: usize = 32 << 20;
/// How many that are longer than those without images are held at once; others wait.
const MAX_LARGE: usize = 16;
/// How long a body may take to arrive.
const MAX_TIME: Duration = Duration::from_mins(1);

/// What bodies may be.
#[derive(Debug)]
pub(super) struct Bodies {
    /// Places for large ones, if the model sees images.
    large: Option<Arc<Semaphore>>,
}

/// A body, and its place where it is large.
type Placed = (Vec<u8>, Option<OwnedSemaphorePermit>);

impl Bodies {
    pub(super) fn new(have_images: bool) -> Self {
        Self { large: have_images.then(|| Arc::new(Semaphore::new(MAX_LARGE))) }
    }

    /// Reads a body to its end even where it is too long: a client reads no answer while it sends.
    pub(super) async fn read(&self, body: Body) -> Result<Placed, ApiError> {
        tokio::time::timeout(MAX_TIME, self.read_parts(body)).await.unwrap_or_else(|_| Err(ApiError::too_slow()))
    }

    async fn read_parts(&self, body: Body) -> Result<Placed, ApiError> {
        let most = if self.large.is_some() { MAX_BYTES_WITH_IMAGES } else { MAX_BYTES };
        let (mut parts, mut bytes, mut num_bytes, mut place) = (body.into_data_stream(), Vec::new(), 0_usize, None);
        while let Some(part) = parts.next().await {
            let part = part.map_err(|_| ApiError::wrong("the body ends too early", None))?;
            num_bytes = num_bytes.saturating_add(part.len());
            if let Some(large) = self.large.as_ref().filter(|_| num_bytes > MAX_BYTES && place.is_none()) {
                place = Arc::clone(large).acquire_owned().await.ok();
            }
            if num_bytes <= most {
                bytes.extend_from_slice(&part);
            }
        }
        if num_bytes <= most { Ok((bytes, place)) } else { Err(ApiError::too_long(most)) }
    }
}
