//! The layout of TensorBoard's custom scalars tab: figures that belong together in one chart.

use tensorboard_proto::layout::{Category, Chart, Chart_oneof_content, Layout, MultilineChartContent};

use crate::measure::figures::tags;

/// A chart: its title, and which figures it shows, by name and tag.
type Shown = (&'static str, fn(&str, &str) -> bool);

const LAYOUT: &[(&str, &[Shown])] = &[
    (
        "Learning",
        &[
            ("loss (nats)", |_, tag| tag.ends_with("/loss")),
            ("score (0 to 1)", |name, _| name.starts_with("eval_score")),
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

fn is_whole(tag: &str) -> bool {
    matches!(tag, "time/step" | "time/wall")
}

pub(super) fn layout() -> Layout {
    let category = |(title, charts): &(&str, &[Shown])| {
        let chart = charts.iter().map(|(title, is_shown)| chart(title, *is_shown)).collect();
        Category { title: (*title).into(), chart, ..Category::default() }
    };
    Layout { category: LAYOUT.iter().map(category).collect(), ..Layout::default() }
}

fn chart(title: &str, is_shown: fn(&str, &str) -> bool) -> Chart {
    // TensorBoard reads a tag as a regular expression; our tags have no special characters.
    let shown = tags().filter(|(name, tag, _)| is_shown(name, tag)).map(|(_, tag, _)| format!("^{tag}$"));
    let lines = MultilineChartContent { tag: shown.collect(), ..MultilineChartContent::default() };
    Chart { title: title.into(), content: Some(Chart_oneof_content::multiline(lines)), ..Chart::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chart_shows_something() {
        for category in layout().category {
            assert!(category.chart.iter().all(|chart| !chart.get_multiline().tag.is_empty()), "{category:?}");
        }
    }
}
