//! Section `[device]` of a recipe.

use crate::device::{DeviceError, DeviceName};
use crate::schema::{Value, section};

section! {
    /// Section `[device]` of a recipe. Whether the device is there is known to [`open`](crate::device::open) only.
    pub struct DeviceConfig {
        /// "auto" takes the first GPU that works, or the CPU; "cpu", "cuda", "cuda:N", or what else is compiled in.
        name: String = "auto".into() => any(EXPECTED, accept_name),
            ["device", "device_map", "accelerator", "backend", "devices", "gpu", "type"];
    }
}

const EXPECTED: &str = "\"auto\", \"cpu\", \"cuda\", \"cuda:N\", \"vulkan\", \"metal\" or \"rocm\"";

fn accept_name(value: &Value) -> Result<String, Option<String>> {
    let Value::String(name) = value else { return Err(None) };
    let hint = match (name.parse::<DeviceName>(), name.as_str()) {
        (Ok(_), _) => return Ok(name.clone()),
        (_, "gpu" | "nvidia") => "this trainer calls it `cuda`",
        (_, "mps") => "this trainer calls it `metal`",
        (Err(DeviceError::UnknownName { hint, .. }), _) if !hint.is_empty() => {
            return Err(Some(hint.trim_start_matches("\n  hint: ").to_owned()));
        }
        _ => return Err(None),
    };
    Err(Some(hint.to_owned()))
}
