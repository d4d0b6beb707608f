//! Descriptions of TensorBoard's tags, and which of them it shows together.

use crate::figures::tags;

/// A chart: its title, and which figures it shows, by name and tag.
type Chart = (&'static str, fn(&str, &str) -> bool);

/// The charts of the custom scalars tab, by category.
const LAYOUT: &[(&str, &[Chart])] = &[
    (
        "Learning",
        &[
            ("loss (nats)", |_, tag| tag.ends_with("/loss")),
            ("learning rate", |name, _| name == "learning_rate"),
            ("gradient norm", |name, _| name == "grad_norm"),
        ],
    ),
    (
        "Throughput",
        &[("tokens a second", |name, _| name == "tokens_per_second"), ("MFU (0 to 1)", |name, _| name == "mfu")],
    ),
    (
        "Where the time goes",
        &[
            ("seconds of a step, by part", |_, tag| tag.starts_with("time/") && !is_whole(tag)),
            ("seconds of a step", |_, tag| is_whole(tag)),
        ],
    ),
    (
        "Utilization",
        &[
            ("percent", |name, _| name.ends_with("_percent")),
            ("power (W)", |name, _| name.ends_with("_watts")),
            ("clocks (MHz)", |name, _| name.ends_with("_mhz")),
        ],
    ),
    (
        "Memory",
        &[
            ("GPU (bytes)", |name, _| name.starts_with("gpu_") && name.ends_with("_bytes")),
            ("host (bytes)", |name, _| name.starts_with("host_") && name.ends_with("_bytes")),
        ],
    ),
];

/// Whether the tag is the time of a whole step.
fn is_whole(tag: &str) -> bool {
    matches!(tag, "time/step" | "time/wall")
}

/// A sentence that says what a tag is, with its unit.
pub(super) fn description(tag: &str) -> Option<&'static str> {
    tags().find(|(_, known, _)| *known == tag).map(|(.., text)| text)
}

/// The layout as TensorBoard's `custom_scalar.Layout`: version = 1, category = 2 { title = 1, chart = 2 { title = 1,
/// multiline = 2 { tag = 1 } } }.
pub(super) fn layout() -> Vec<u8> {
    let categories = LAYOUT.iter().map(|(title, charts)| {
        let charts = charts.iter().map(|(title, is_shown)| {
            let shown = tags().filter(|(name, tag, _)| is_shown(name, tag));
            // TensorBoard reads a tag as a regular expression; our tags have no special characters.
            let lines: Vec<u8> = shown.flat_map(|(_, tag, _)| field(1, format!("^{tag}$").as_bytes())).collect();
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
    // Seven bits per byte, the lowest first.
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
    use super::*;

    #[test]
    fn every_tag_says_what_it_is_and_every_chart_shows_something() {
        for (_, tag, _) in tags() {
            assert!(description(tag).is_some_and(|text| text.ends_with('.')), "{tag}");
        }
        for (title, is_shown) in LAYOUT.iter().flat_map(|(_, charts)| *charts) {
            assert!(tags().any(|(name, tag, _)| is_shown(name, tag)), "{title}");
        }
    }

    #[test]
    fn lengths_above_127_take_two_bytes() {
        assert_eq!(field(1, b"ab"), [0x0a, 2, b'a', b'b']);
        let long = field(2, &[7; 300]);
        assert_eq!((&long[..3], long.len()), ([0x12, 0xac, 0x02].as_slice(), 303));
    }
}
