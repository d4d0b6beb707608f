//! The check at the start: a kernel of ours between two operations of burn's.

use burn::tensor::{DType, Device, Tensor};

use super::stream::Launch;
use crate::ops::custom::{custom, spec};
use crate::util::faults;
use crate::util::panics::guarded;

const MODULE: &str = "twice";

const LEN: u16 = 1000;
const THREADS: usize = 128;

/// Computes 2 x 1 + 1, the product by a kernel of ours, many times at once.
///
/// # Errors
/// If that fails, or comes out wrong.
pub(super) fn check(device: &Device) -> Result<(), String> {
    let result = guarded(|| {
        let ones = Tensor::<1>::ones([usize::from(LEN)], (device, DType::F32)).into_dispatch();
        let [doubled] = custom("twice", [ones], [spec(DType::F32, [usize::from(LEN)])], |inputs, outputs| {
            let grid = [usize::from(LEN).div_ceil(THREADS), 1, 1];
            Launch::new(MODULE, "twice", grid, THREADS).read(&inputs[0]).write(&outputs[0]).ints([LEN.into()]).launch();
        });
        let sum = Tensor::<1>::from_dispatch(doubled) + 1.0;
        sum.try_into_data().map(|data| data.iter::<f32>().all(|value| value == 3.0))
    });
    match result {
        Ok(Ok(true)) => Ok(()),
        Ok(Ok(false)) => Err("a kernel on burn's stream gave a wrong result".to_owned()),
        Ok(Err(error)) => Err(faults::reason(&error.to_string())),
        Err(panic) => Err(faults::reason(&panic)),
    }
}
