//! Keeps what a block's backward begins with in host memory, from its forward on.
//!
//! A separate thread copies them out of the device, on a separate stream where the backend has streams, so that neither
//! the loop nor the device's computation waits. The loop may be at most `MAX_LEAVING` tensors ahead of that thread.
//! Without this limit, the loop would queue the whole forward before the first input has left the device, and no memory
//! would be saved. The same thread prepares the way back one block ahead (into page-locked memory where the backend has
//! it). The loop itself queues the copy to the device, in the order of its computation.

use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::thread::JoinHandle;

use burn::tensor::{Device, Tensor, TensorData};
use rayon::prelude::*;

use crate::util::faults;
use crate::util::panics::guarded;

/// Number of tensors that may be waiting to leave the device when the next one is handed over.
const MAX_LEAVING: usize = 2;

/// Bytes that a core copies at a time.
const COPIED: usize = 1 << 20;

/// What is read from the device, to people.
const WHAT: &str = "what is kept of a block";

/// The thread that copies; it ends when this is dropped.
#[derive(Debug)]
pub struct HostParking {
    device: Device,
    /// Dropped to end the thread.
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Job {
    /// Copy from the device. CubeCL's data are a promise to read the tensor's memory, which keeps it from being freed but
    /// not from being the output of an operation in place. While the tensor itself is held, none takes its memory. Another
    /// thread waits for what computes a tensor up to where its memory was taken, which later operations may have written: so
    /// the promise of a result behind them is read first.
    Leave(Box<[TensorData; 2]>, Box<Tensor<2>>, Sender<Copied>),
    /// Move to the memory that the device reads fastest.
    Return(Receiver<Copied>, Sender<Copied>),
}

/// A copy, or why there is none.
type Copied = Result<TensorData, String>;

/// A tensor in host memory, on its way there, or on its way back.
#[derive(Debug)]
pub struct Parked {
    device: Device,
    data: Receiver<Copied>,
}

impl HostParking {
    /// Starts the thread for tensors of `device`.
    #[must_use]
    pub fn new(device: Device) -> Self {
        let (jobs, queue) = mpsc::sync_channel(MAX_LEAVING);
        let on_thread = device.clone();
        let thread = std::thread::Builder::new().name("offload".into()).spawn(move || work(&queue, &on_thread));
        Self { device, jobs: Some(jobs), thread: thread.ok() }
    }

    /// Moves a tensor to host memory. Its device memory is freed after the copy, if nothing else holds the tensor.
    /// Waits while earlier tensors are still leaving.
    ///
    /// # Panics
    /// As [`faults::read`].
    #[must_use]
    pub fn park(&self, tensor: Tensor<2>) -> Parked {
        let (done, data) = mpsc::channel();
        // On a GPU this queues the computation of the tensor, and copies nothing yet.
        let behind = tensor.clone().narrow(0, 0, 1).narrow(1, 0, 1).neg().try_into_data();
        match behind.and_then(|behind| Ok([behind, tensor.clone().try_into_data()?])) {
            Ok(promises) => self.send(Job::Leave(Box::new(promises), Box::new(tensor), done)),
            Err(error) => faults::throw(&error.to_string(), WHAT),
        }
        Parked { device: self.device.clone(), data }
    }

    /// Prepares the tensor's way back, so that [`Parked::tensor`] waits less.
    pub fn fetch(&self, parked: &mut Parked) {
        let (done, data) = mpsc::channel();
        self.send(Job::Return(std::mem::replace(&mut parked.data, data), done));
    }

    fn send(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            // If the thread has ended, `Parked::tensor` reports it.
            let _ = jobs.send(job);
        }
    }
}

impl Drop for HostParking {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Panics of the backend are caught and reported by `Parked::tensor`.
            let _ = thread.join();
        }
    }
}

impl Parked {
    /// The tensor, back on the device.
    ///
    /// # Panics
    /// As [`faults::read`].
    #[must_use]
    pub fn tensor(self) -> Tensor<2> {
        let copied = self.data.recv().unwrap_or_else(|_| Err("the thread that copies has ended".into()));
        let data = copied.unwrap_or_else(|error| faults::throw(&error, WHAT));
        let dtype = data.dtype();
        Tensor::from_data(data, (&self.device, dtype))
    }
}

fn work(jobs: &Receiver<Job>, device: &Device) {
    for job in jobs {
        match job {
            Job::Leave(promises, tensor, done) => {
                let [behind, data] = *promises;
                // CubeCL reads its bytes at the first access and holds the device memory as long as the bytes live. Our
                // own copy releases it.
                let copy = guarded(|| (behind.as_bytes().len(), copied(data.as_bytes())).1);
                let copy = copy.map(|copy| TensorData::from_bytes_vec(copy, data.shape().clone(), data.dtype()));
                drop((data, tensor));
                let _ = done.send(copy);
            }
            Job::Return(parked, done) => {
                let Ok(copied) = parked.recv() else { continue };
                let staged = copied.and_then(|mut data| {
                    guarded(|| device.staging(std::iter::once(&mut data)))?;
                    Ok(data)
                });
                let _ = done.send(staged);
            }
        }
    }
}

/// A copy by all cores: one alone, for which all pages are new, may take longer than the device for a block.
fn copied(bytes: &[u8]) -> Vec<u8> {
    let mut copy = vec![0; bytes.len()];
    copy.par_chunks_mut(COPIED).zip(bytes.par_chunks(COPIED)).for_each(|(copy, bytes)| copy.copy_from_slice(bytes));
    copy
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;

    use super::*;
    use crate::ops::host;

    #[test]
    fn what_leaves_comes_back_with_its_type_and_every_bit() {
        let device = Device::flex();
        let parking = HostParking::new(device.clone());
        let tensor = |k: usize| host::tensor((0..12).map(|i| (i * k) as f32 / 7.0).collect(), [3, 4], &device);
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let parked: Vec<_> = (0..5).map(|k| parking.park(tensor(k).cast(dtype))).collect();
            for (k, mut parked) in parked.into_iter().enumerate().rev() {
                if k > 0 {
                    parking.fetch(&mut parked);
                }
                let back = parked.tensor();
                assert_eq!(back.dtype(), dtype);
                back.into_data().assert_eq(&tensor(k).cast(dtype).into_data(), true);
            }
        }
    }
}
