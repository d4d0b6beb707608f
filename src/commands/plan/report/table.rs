//! The table of a plan.

use super::{Host, PlannedRows, Report, bytes_brought, seconds_of_reading, whole};
use crate::commands::plan::target::PlanTarget;
use crate::config::CostConfig;
use crate::train::budget::fit::{self, USABLE, size};
use crate::train::budget::memory::Component;
use crate::util::stats::as_f64;
use crate::util::text::{counted, thousands, with_commas};

/// The whole text. `without_rows`: why the training rows cannot be read.
pub(in crate::commands::plan) fn table(
    report: &Report,
    target: &PlanTarget,
    prices: &CostConfig,
    without_rows: Option<&str>,
) -> String {
    let mut lines = vec![format!("device: {}", report.device)];
    lines.extend(report.decision.as_ref().map(|decision| format!("gradient checkpointing: {decision}")));
    lines.extend(rows(&report.plan.components));
    let peak = as_f64(report.plan.peak_bytes);
    lines.push(format!("  {:<24} {:>10}   with every row at data.max_length", "peak", size(peak)));
    lines.extend(bringing(report));
    lines.extend(verdict(peak, target));
    lines.extend(host(report));
    for suggestion in &report.suggestions {
        let what = if report.fits == Some(true) { "would still fit" } else { "fits with" };
        lines.push(format!("  {what} {}   ({})", suggestion.arguments(), size(as_f64(suggestion.peak_bytes))));
    }
    if report.fits == Some(false) && report.suggestions.is_empty() {
        lines.push(format!("  {}", fit::smaller(&report.plan, report.answer_tokens.is_some())));
    }
    lines.extend(times(report, without_rows));
    lines.extend(costs(report, target.is_here, prices));
    if report.step_seconds.is_none() {
        lines.push("note: no rate of this device is known in train.precision, so no time is estimated".to_owned());
    }
    lines.extend(target.about_others().filter(|_| report.step_seconds.is_some() && !report.is_calibrated));
    if target.kind.is_gpu() {
        let note = "note: these are estimates; on an H200, sizes in bf16 were within 3 % of what was measured, and times within 15 %; \
                    no other card has been measured";
        lines.push(note.to_owned());
    }
    lines.join("\n")
}

fn rows(components: &[Component]) -> impl Iterator<Item = String> {
    let taken = components.iter().filter(|component| component.bytes > 0);
    taken.map(|Component { name, bytes, depends_on, .. }| {
        format!("  {name:<24} {:>10}   {depends_on}", size(as_f64(*bytes)))
    })
}

/// The host's memory when training on a GPU, and whether it suffices.
fn host(report: &Report) -> Vec<String> {
    let Some(Host { plan, free_memory_bytes, fits }) = &report.host else { return Vec::new() };
    let mut lines = vec!["host:".to_owned()];
    lines.extend(rows(&plan.components));
    lines.push(format!("  {:<24} {:>10}   at a time", "peak", size(as_f64(plan.peak_bytes))));
    if let Some((fits, free)) = fits.zip(*free_memory_bytes) {
        #[expect(clippy::cast_precision_loss, reason = "bytes of a memory")]
        let free = size(free as f64);
        let verdict = if fits { "fits into" } else { "does not fit into" };
        lines.push(format!("{verdict} the {free} of host memory that are free now"));
    }
    lines
}

/// What a step reads from disk, or copies from host memory.
fn bringing(report: &Report) -> Vec<String> {
    let (plan, rate) = (&report.plan, report.disk_bytes_per_second);
    let mut lines = Vec::new();
    if let Some(read) = plan.read_bytes_per_step {
        let read = size(as_f64(read));
        let seconds = seconds_of_reading(plan, rate).zip(rate).map(|(seconds, rate)| {
            format!(" ({} at the disk's {:.1} GB/s, measured now)", duration(seconds), rate / 1e9)
        });
        let seconds = seconds.unwrap_or_default();
        lines.push(format!("  reads {read} of weights in a step{seconds} where the page cache does not hold them"));
    }
    if let Some((moved, seconds)) = plan.moved_bytes_per_step.zip(plan.seconds_of_copies()) {
        let (moved, seconds) = (size(as_f64(moved)), duration(seconds));
        lines.push(format!(
            "  copies {moved} of weights to the GPU in a step: {seconds} at 25 GB/s, a rate assumed for the bus"
        ));
    }
    if let Some((layered, brought)) = report.layered.as_ref().and_then(|plan| Some((plan, bytes_brought(plan)?))) {
        let [brought, peak] = [brought, layered.peak_bytes].map(|bytes| size(as_f64(bytes)));
        lines.push(format!("  train.layered_accumulation=true makes it {brought}, with a peak of {peak}"));
    }
    lines
}

/// Energy and cost of the run.
fn costs(report: &Report, is_here: bool, prices: &CostConfig) -> Vec<String> {
    let mut lines = Vec::new();
    let estimated = if report.is_at_most { "estimated: at most" } else { "estimated:" };
    let power = if is_here { "the GPU's power limit" } else { "the board's full power" };
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
    lines
}

/// Whether the peak fits into the memory.
fn verdict(peak: f64, target: &PlanTarget) -> Vec<String> {
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
            "{}: {} tokens/s, {} a step of {} tokens at full length{}",
            if report.is_calibrated { "measured" } else { "estimated" },
            thousands(rate),
            duration(step),
            with_commas(report.tokens_per_step),
            if report.ranks.is_some() { ", on one rank" } else { "" }
        ));
    }
    lines.extend(report.ranks.iter().flat_map(|step| step.lines(duration)));
    if let Some(PlannedRows { per_epoch }) = report.rows {
        let at_most = if report.is_at_most { "at most " } else { "" };
        lines.push(format!("rows: {at_most}{} an epoch", with_commas(per_epoch)));
    }
    lines.extend(report.images.iter().flat_map(|images| images.lines(duration)));
    let (Some(steps), Some(tokens)) = (report.steps, report.total_tokens) else {
        let of_rows = report.step_seconds.map(|step| step * 1000.0 / as_f64(report.rows_per_step));
        lines.extend(of_rows.map(|seconds| format!("estimated: at most {} for 1,000 rows", duration(seconds))));
        let why = without_rows.unwrap_or_default();
        lines.push(format!("note: the rows are not counted, and train.max_steps is not given: {why}"));
        return lines;
    };
    let (about, steps, tokens) =
        (if report.is_at_most { "at most" } else { "about" }, counted(steps, "step"), with_commas(tokens));
    let time = report.seconds.map(|seconds| format!("{} for ", duration(seconds))).unwrap_or_default();
    let evaluations = match (report.evaluations, report.evaluation_seconds) {
        (Some(number @ 1..), Some(seconds)) => {
            format!(", {} of it for {}", duration(seconds), counted(number, "evaluation"))
        }
        _ => String::new(),
    };
    lines.push(format!(
        "estimated: {about} {time}{steps} of {} tokens, {tokens} in all{evaluations}{}",
        with_commas(whole(report.mean_step_tokens)),
        not_counted(report)
    ));
    if let Some(why) = without_rows {
        lines.push(format!("note: every row is taken to be of full length, since the rows cannot be looked at: {why}"));
    }
    lines
}

/// What a run's time leaves out.
fn not_counted(report: &Report) -> String {
    let of_answers = match report.answer_tokens {
        Some(tokens) if !report.is_at_most => {
            Some(format!("writing the answers, each taken to be of {} tokens", with_commas(tokens)))
        }
        Some(_) => Some("writing the answers".to_owned()),
        None => None,
    };
    let of_evaluations = match report.evaluations {
        None => Some("evaluations"),
        Some(_) if report.writes => Some("the samples and scores of evaluations"),
        Some(_) => None,
    };
    let of_rounding = report.ship_as.map(|it| format!("making and rounding to the {} file", it.name()));
    let without: Vec<String> =
        of_evaluations.map(str::to_owned).into_iter().chain(of_answers).chain(of_rounding).collect();
    if without.is_empty() { String::new() } else { format!(", without {}", without.join(" and ")) }
}

fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
