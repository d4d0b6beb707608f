//! What TensorBoard says about its tags, and which it shows together.

/// What each tag is, with its unit.
const DESCRIPTIONS: &[(&str, &str)] = &[
    ("train/loss", "Mean loss of the step's target tokens, in nats."),
    ("train/learning_rate", "Learning rate of the step."),
    ("train/grad_norm", "Global norm of the gradient, before clipping."),
    ("train/epoch", "Passes over the training rows so far."),
    ("train/tokens", "Tokens of the step that are not padding."),
    ("train/target_tokens", "Tokens of the step that carry loss."),
    ("eval/loss", "Mean loss of all target tokens of the evaluation rows, in nats."),
    ("eval/perplexity", "exp of the evaluation loss."),
    ("throughput/tokens_per_second", "Tokens that are not padding, per second of step time."),
    ("throughput/mfu", "Model FLOPs per second over the fastest matrix product measured on the device, from 0 to 1."),
    ("time/step", "Seconds of the step itself: evaluations, samples and checkpoints after it are left out."),
    ("time/wall", "Seconds since the end of the step before, all of them: the sum of the parts below."),
    ("time/data_wait", "Seconds in which the loop waited for data."),
    (
        "time/host_to_device",
        "Seconds for laying micro-batches out and handing them to the device; on a GPU, see time/forward.",
    ),
    (
        "time/forward",
        "Seconds of the forward passes; on a GPU of one step in 50, which waits for it at the end of every part.",
    ),
    ("time/backward", "Seconds of the backward passes, in the steps that have time/forward."),
    (
        "time/forward_backward",
        "Seconds of both passes; in steps of a GPU without time/forward with the update of the step before.",
    ),
    (
        "time/optimizer",
        "Seconds of clipping and the update; in steps of a GPU without time/forward those of handing it over.",
    ),
    ("time/logging", "Seconds for writing figures."),
    ("time/evaluation", "Seconds of evaluations, and of the samples drawn at them."),
    ("time/checkpoint", "Seconds for writing checkpoints."),
    ("time/other", "Seconds of the wall time that are in none of the other parts."),
    ("data/rows", "Rows that were read for the step."),
    ("data/truncated_rows", "Rows of the step that were longer than `data.max_length` and were cut."),
    ("data/padding_tokens", "Tokens of padding in the step's micro-batches."),
    (
        "data/worker_busy",
        "Seconds in which data workers made the micro-batches finished during the step, all workers together.",
    ),
    ("data/worker_cpu", "Seconds of processor time in data/worker_busy."),
    ("data/worker_queued", "Seconds in which a data worker could have run and no processor was free."),
    ("memory/host", "Bytes of the process that are in RAM."),
    ("memory/host_available", "Bytes that the machine, or the process's control group, has left; lowest of the step."),
    ("memory/host_swapped", "Bytes of the process that are swapped out."),
    ("cpu/utilization", "Percent of all processor threads that the process used during the step."),
    ("disk/read", "Bytes that the process read from disks during the step, not from the page cache."),
    ("disk/major_page_faults", "Page faults of the process during the step that waited for a disk."),
    ("gpu/utilization", "Percent of the time in which the GPU ran a kernel, mean over the step."),
    ("gpu/memory_used", "Bytes of the GPU's memory that are in use, by whatever process."),
    ("gpu/memory_allocated", "Bytes of live tensors in the backend's pools."),
    ("gpu/memory_reserved", "Bytes that the backend's pools hold."),
    (
        "gpu/memory_peak",
        "Bytes of live tensors, the most that were seen: after the last forward, or at the end of the step.",
    ),
    ("gpu/power", "Watts that the GPU draws, mean over the step."),
    ("gpu/energy", "Joules that the GPU has used since the start."),
    ("cpu/energy", "Joules that the processor's packages have used since the start, by whatever process."),
    ("gpu/temperature", "Temperature of the GPU in degrees Celsius."),
    ("gpu/sm_activity", "Percent of the GPU's multiprocessors that had work, mean over the step."),
    (
        "gpu/memory_activity",
        "Percent of the bandwidth of the GPU's memory that was used, where the driver counts it (Hopper and newer); \
         elsewhere percent of the time in which it was read or written. Mean over the step.",
    ),
    ("gpu/tensor_activity", "Percent of the time in which the GPU's tensor cores were at work, mean over the step."),
    (
        "gpu/float_activity",
        "Percent of the time in which the GPU's pipelines of single or half precision outside of the tensor cores were at \
         work, the busier of the two, mean over the step.",
    ),
    ("gpu/sm_clock", "MHz of the GPU's multiprocessors, mean over the step."),
    ("gpu/memory_clock", "MHz of the GPU's memory, mean over the step."),
    ("gpu/pcie_received", "Bytes a second that the GPU received over PCI Express, mean over the step."),
    ("gpu/pcie_sent", "Bytes a second that the GPU sent over PCI Express, mean over the step."),
    ("gpu/other_processes_memory", "Bytes of the GPU's memory that other processes hold."),
];

/// A chart: its title and tags.
type Chart = (&'static str, &'static [&'static str]);

/// The charts of the custom scalars tab, by category.
const LAYOUT: &[(&str, &[Chart])] = &[
    (
        "Learning",
        &[
            ("loss (nats)", &["train/loss", "eval/loss"]),
            ("learning rate", &["train/learning_rate"]),
            ("gradient norm", &["train/grad_norm"]),
        ],
    ),
    ("Throughput", &[("tokens a second", &["throughput/tokens_per_second"]), ("MFU (0 to 1)", &["throughput/mfu"])]),
    (
        "Where the time goes",
        &[
            (
                "seconds of a step, by part",
                &[
                    "time/data_wait",
                    "time/host_to_device",
                    "time/forward",
                    "time/backward",
                    "time/forward_backward",
                    "time/optimizer",
                    "time/logging",
                    "time/evaluation",
                    "time/checkpoint",
                    "time/other",
                ],
            ),
            ("seconds of a step", &["time/step", "time/wall"]),
        ],
    ),
    (
        "Utilization",
        &[
            (
                "percent",
                &[
                    "gpu/utilization",
                    "gpu/sm_activity",
                    "gpu/memory_activity",
                    "gpu/tensor_activity",
                    "gpu/float_activity",
                    "cpu/utilization",
                ],
            ),
            ("GPU power (W)", &["gpu/power"]),
            ("GPU clocks (MHz)", &["gpu/sm_clock", "gpu/memory_clock"]),
        ],
    ),
    (
        "Memory",
        &[
            (
                "GPU (bytes)",
                &[
                    "gpu/memory_used",
                    "gpu/memory_reserved",
                    "gpu/memory_peak",
                    "gpu/memory_allocated",
                    "gpu/other_processes_memory",
                ],
            ),
            ("host (bytes)", &["memory/host", "memory/host_swapped", "memory/host_available"]),
        ],
    ),
];

/// What a tag is, in a sentence with its unit.
pub(super) fn description(tag: &str) -> Option<&'static str> {
    DESCRIPTIONS.iter().find(|(known, _)| *known == tag).map(|(_, text)| *text)
}

/// The layout as TensorBoard's `custom_scalar.Layout`: version = 1, category = 2 { title = 1, chart = 2 { title = 1,
/// multiline = 2 { tag = 1 } } }.
pub(super) fn layout() -> Vec<u8> {
    let categories = LAYOUT.iter().map(|(title, charts)| {
        let charts = charts.iter().map(|(title, tags)| {
            // A tag is a regular expression there, and ours have none of its characters.
            let tags = tags.iter().flat_map(|tag| field(1, format!("^{tag}$").as_bytes()));
            let lines = tags.collect::<Vec<u8>>();
            field(2, &[field(1, title.as_bytes()), field(2, &lines)].concat())
        });
        field(2, &[field(1, title.as_bytes()), charts.flatten().collect()].concat())
    });
    categories.flatten().collect()
}

/// A field of a protocol buffer that holds bytes: its number and kind, its length, the bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    const LENGTH_DELIMITED: u8 = 2;
    let mut field = vec![number << 3 | LENGTH_DELIMITED];
    let mut length = bytes.len();
    // Seven bits a byte, the lowest first.
    while length >= 0x80 {
        field.push(u8::try_from(length & 0x7f).unwrap_or_default() | 0x80);
        length >>= 7;
    }
    field.push(u8::try_from(length).unwrap_or_default());
    field.extend_from_slice(bytes);
    field
}

#[cfg(test)]
mod tests {
    use super::super::SCALAR_TAGS;
    use super::*;

    #[test]
    fn every_tag_says_what_it_is_and_every_chart_shows_tags_that_there_are() {
        let tags: Vec<&str> = SCALAR_TAGS.iter().map(|(_, tag)| *tag).collect();
        for tag in &tags {
            assert!(description(tag).is_some_and(|text| text.ends_with('.')), "{tag}");
        }
        assert_eq!(DESCRIPTIONS.len(), tags.len(), "a description of a tag that there is not");
        for tag in LAYOUT.iter().flat_map(|(_, charts)| *charts).flat_map(|(_, tags)| *tags) {
            assert!(tags.contains(tag), "{tag}");
        }
    }

    #[test]
    fn lengths_above_127_take_two_bytes() {
        assert_eq!(field(1, b"ab"), [0x0a, 2, b'a', b'b']);
        let long = field(2, &[7; 300]);
        assert_eq!((&long[..3], long.len()), ([0x12, 0xac, 0x02].as_slice(), 303));
    }
}
