//! A plan as a table, for people.

use super::report::{Host, Report, Rows, whole};
use super::target::Target;
use crate::metrics::CostConfig;
use crate::stats::as_f64;
use crate::text::with_commas;
use crate::train::fit::{USABLE, size};
use crate::train::memory::Component;

/// The whole text. `without_rows`: why the training rows cannot be read.
pub(super) fn table(report: &Report, target: &Target, prices: &CostConfig, without_rows: Option<&str>) -> String {
    let mut lines = vec![format!("device: {}", report.device)];
    lines.extend(report.plan.components.iter().map(row));
    let peak = as_f64(report.plan.peak_bytes);
    lines.push(format!("  {:<24} {:>10}   with every row at data.max_length", "peak", size(peak)));
    lines.extend(verdict(peak, target));
    lines.extend(host(report));
    for suggestion in &report.suggestions {
        let what = if report.fits == Some(true) { "would still fit" } else { "fits with" };
        lines.push(format!("  {what} {}   ({})", suggestion.arguments(), size(as_f64(suggestion.peak_bytes))));
    }
    if report.fits == Some(false) && report.suggestions.is_empty() {
        lines.push(
            "  nothing in the recipe makes it fit: take a shorter data.max_length, a smaller model or a larger device"
                .into(),
        );
    }
    lines.extend(times(report, without_rows));
    let estimated = if report.is_at_most { "estimated: at most" } else { "estimated:" };
    let power = if target.is_here { "the GPU's power limit" } else { "the board's full power" };
    if let Some(kwh) = report.energy_kwh {
        lines.push(format!("{estimated} {kwh:.2} kWh at {power}"));
    }
    let knows_energy = report.energy_kwh.is_some();
    if let Some(cost) = report.cost {
        let hour = prices.price_per_hour.map(|price| format!("{price} an hour"));
        let kwh = prices.price_per_kwh.filter(|_| knows_energy).map(|price| format!("{price} a kWh"));
        let at: Vec<String> = hour.into_iter().chain(kwh).collect();
        lines.push(format!("{estimated} {cost:.2} {} at {}", prices.currency, at.join(" and ")));
    }
    if prices.price_per_kwh.is_some() && report.seconds.is_some() && !knows_energy {
        lines.push("note: the power of this device is not known, so its energy is in no cost".to_owned());
    }
    if report.step_seconds.is_none() {
        lines.push("note: no rate of this device is known in train.precision, so no time is estimated".to_owned());
    }
    if !target.is_cpu {
        lines.push("note: sizes and times on GPUs are reckoned, not yet held against a measurement".to_owned());
    }
    lines.join("\n")
}

fn row(component: &Component) -> String {
    format!("  {:<24} {:>10}   {}", component.name, size(as_f64(component.bytes)), component.depends_on)
}

/// The host's memory when training on a GPU, and whether it suffices.
fn host(report: &Report) -> Vec<String> {
    let Some(Host { plan, free_memory_bytes, fits }) = &report.host else { return Vec::new() };
    let mut lines = vec!["host:".to_owned()];
    lines.extend(plan.components.iter().map(row));
    lines.push(format!("  {:<24} {:>10}   at a time", "peak", size(as_f64(plan.peak_bytes))));
    if let Some((fits, free)) = fits.zip(*free_memory_bytes) {
        #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
        let free = size(free as f64);
        let verdict = if fits { "fits into" } else { "does not fit into" };
        lines.push(format!("{verdict} the {free} of host memory that are free now"));
    }
    lines
}

/// Whether the peak fits into the memory.
fn verdict(peak: f64, target: &Target) -> Vec<String> {
    let Some((memory, usable)) = target.memory_bytes.zip(target.usable_bytes()) else {
        return vec!["the device's memory is not known: give it by --memory".to_owned()];
    };
    let (mut lines, is_free) = (Vec::new(), target.free_bytes.is_some());
    let of = |bytes: f64| if is_free { format!("the {} that are free now", size(bytes)) } else { size(bytes) };
    let all = if is_free { format!(" ({} in all)", size(memory)) } else { String::new() };
    if peak <= usable * USABLE {
        lines.push(format!("fits: {} of {} would be left{all}", size(usable - peak), of(usable)));
    } else {
        let (short, percent) = (size(peak - usable * USABLE), USABLE * 100.0);
        lines.push(format!(
            "does not fit: short by {short} of {}, of which {percent:.0} % can be used{all}",
            of(usable)
        ));
        if peak <= memory * USABLE {
            lines.push("  it would fit if nobody else used the device's memory".to_owned());
        }
    }
    lines
}

/// Rows, steps, tokens and time.
fn times(report: &Report, without_rows: Option<&str>) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(step) = report.step_seconds {
        let rate = as_f64(report.tokens_per_step) / step;
        lines.push(format!(
            "{}: {rate:.0} tokens/s, {} a step of {} tokens at full length",
            if report.is_calibrated { "measured" } else { "estimated" },
            duration(step),
            with_commas(report.tokens_per_step)
        ));
    }
    if let Some(Rows { per_epoch }) = report.rows {
        lines.push(format!("rows: {} an epoch", with_commas(per_epoch)));
    }
    let (Some(steps), Some(tokens)) = (report.steps, report.total_tokens) else {
        let why = without_rows.unwrap_or_default();
        lines.push(format!("the rows are not counted ({why}): give train.max_steps for the time of the whole run"));
        return lines;
    };
    let (about, steps, tokens) =
        (if report.is_at_most { "at most" } else { "about" }, with_commas(steps), with_commas(tokens));
    let time = report.seconds.map(|seconds| format!("{} for ", duration(seconds))).unwrap_or_default();
    lines.push(format!(
        "estimated: {about} {time}{steps} steps of {} tokens, {tokens} in all, without evaluations",
        with_commas(whole(report.mean_step_tokens))
    ));
    if let Some(why) = without_rows {
        lines.push(format!("note: every row is taken to be of full length, since the rows cannot be looked at: {why}"));
    }
    lines
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
