//! Clocks that are kept down.

use std::cmp::Reverse;

use crate::diagnosis::figures::as_f64;
use crate::diagnosis::text::{finding, percent};
use crate::diagnosis::{Finding, Run, Severity};

/// Share of the steps from which on it is told of.
const MIN_STEPS: f64 = 0.1;

/// Rules and their names for people, the gravest first.
const CLASSES: [(&str, &str); 3] = [
    ("throttled_thermal", "THERMAL THROTTLING"),
    ("throttled_power", "POWER THROTTLING"),
    ("throttled_clocks", "CLOCK THROTTLING"),
];

/// Place of a reason's class in [`CLASSES`].
fn class_of(reason: &str) -> usize {
    match reason {
        reason if reason.contains("thermal") => 0,
        reason if reason.contains("power") => 1,
        _ => 2,
    }
}

/// Heat, power or a setting keeps the GPU's clocks down.
pub(in crate::diagnosis) fn throttled(run: &Run) -> Option<Finding> {
    let figures = &run.figures;
    let share_of = |steps: u64| as_f64(steps) / as_f64(figures.num_steps.max(1));
    let lasting = figures.throttled_steps.iter().filter(|(_, steps)| share_of(**steps) >= MIN_STEPS);
    // The gravest of what lasted: a moment of heat is not what a run at its power limit is held back by.
    let (reason, steps) = lasting.max_by_key(|(reason, steps)| (Reverse(class_of(reason)), **steps))?;
    let share = share_of(*steps);
    let (rule, what) = CLASSES[class_of(reason)];
    // How far the clock is down, by the highest that was seen in this run.
    let clocks = figures.sm_clock_mhz.get().zip(figures.sm_clock_mhz.max());
    let down = clocks.map_or(0.0, |(mean, most)| 1.0 - mean / most.max(1.0));
    let verdict = format!("{what}: {reason} in {} of the steps", percent(share));
    let names = figures.throttled_steps.iter().map(|(name, steps)| format!("{name} in {steps}"));
    let mut evidence = vec![format!("of {} steps: {}", figures.num_steps, names.collect::<Vec<_>>().join(", "))];
    evidence.extend(clocks.map(|(mean, most)| {
        format!("multiprocessors at {mean:.0} MHz on average, {most:.0} MHz at most: up to {:.2}x slower", most / mean)
    }));
    let heat = figures.temperature_celsius.max().map(|celsius| format!("{celsius:.0} C at most"));
    let power = figures.power_watts.get().map(|watts| format!("{watts:.0} W on average"));
    let machine: Vec<String> = [heat, power].into_iter().flatten().collect();
    evidence.extend((!machine.is_empty()).then(|| machine.join(", ")));
    let severity = match rule {
        "throttled_thermal" => Severity::Problem,
        _ if down > 0.1 => Severity::Advice,
        // A card that computes at its power limit does what it can.
        _ => Severity::Note,
    };
    Some(Finding { evidence, ..finding(rule, severity, None, verdict) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::tests::gpu_run;
    use crate::metrics::StepMetrics;

    #[test]
    fn heat_is_told_from_power_and_power_that_costs_clocks_from_power_that_does_not() {
        let held = |reason: &'static str, clock: f64| {
            gpu_run(move |line: &mut StepMetrics| {
                line.gpu_throttle_reasons = line.step.is_multiple_of(2).then(|| vec![reason.into()]);
                line.gpu_sm_clock_mhz = Some(if line.step > 90 { 1980.0 } else { clock });
            })
        };
        let hot = throttled(&held("hardware thermal slowdown", 1200.0)).unwrap();
        assert_eq!((hot.rule.as_str(), hot.severity), ("throttled_thermal", Severity::Problem));
        assert!(hot.verdict.starts_with("THERMAL THROTTLING: hardware thermal slowdown in 50%"), "{hot:#?}");
        assert!(hot.evidence.iter().any(|line| line.starts_with("60 C at most, 600 W")), "{hot:#?}");
        assert_eq!(throttled(&held("power cap", 1200.0)).unwrap().severity, Severity::Advice);
        assert_eq!(throttled(&held("power cap", 1950.0)).unwrap().severity, Severity::Note);
        assert_eq!(throttled(&held("application clocks", 1200.0)).unwrap().rule, "throttled_clocks");
        assert!(throttled(&gpu_run(|_| {})).is_none());
        let rarely = gpu_run(|line| line.gpu_throttle_reasons = (line.step == 50).then(|| vec!["power cap".into()]));
        assert!(throttled(&rarely).is_none());
        // What was seen once names neither the finding nor its share.
        let mostly_power = |hot_steps: u64| {
            gpu_run(move |line| {
                let mut reasons = vec!["power cap".to_owned()];
                reasons.extend((line.step <= hot_steps + 1).then(|| "thermal slowdown".to_owned()));
                line.gpu_throttle_reasons = Some(reasons);
            })
        };
        let once = throttled(&mostly_power(1)).unwrap();
        assert_eq!((once.rule.as_str(), once.severity), ("throttled_power", Severity::Note));
        assert_eq!(once.verdict, "POWER THROTTLING: power cap in 100% of the steps");
        let hot = throttled(&mostly_power(30)).unwrap();
        assert_eq!(hot.verdict, "THERMAL THROTTLING: thermal slowdown in 30% of the steps");
    }
}
