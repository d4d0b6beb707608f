//! Throttled clocks.

use std::cmp::Reverse;

use crate::diagnosis::text::{finding, percent};
use crate::diagnosis::{Finding, Run, Severity};

/// Share of the time from which throttling is reported.
const MIN_SHARE: f64 = 0.1;
/// Lost share of the clock from which throttling is worth a change,
const MUCH_DOWN: f64 = 0.1;
/// and from which it is reported where the driver names no reason: many cards never reach their highest clock.
const DOWN_WITHOUT_REASON: f64 = 0.25;
/// A GPU whose kernels run for less of the time, in percent, may have low clocks because it idles.
const BUSY_GPU_PERCENT: f64 = 85.0;

/// The reason that a GPU's own power limit gives. A power brake comes from outside the GPU.
const POWER_CAP: &str = "power cap";

/// What throttles a clock, the gravest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    Heat,
    Power,
    Setting,
}

impl Cause {
    fn of(reason: &str) -> Self {
        match reason {
            reason if reason.contains("thermal") => Self::Heat,
            reason if reason.contains("power") => Self::Power,
            _ => Self::Setting,
        }
    }
}

/// No recipe key helps.
const LOCKED: &str =
    "`nvidia-smi -q -d CLOCK` shows clocks that are set; root gives them free with `nvidia-smi -rgc -rac`";

/// Heat, power or a setting throttles the GPU's clocks.
pub(super) fn throttled(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let share = |seconds: f64| figures.share_of_steps(seconds);
    // The highest clock: the driver's figure or, where it gives none, the highest seen. The latter says nothing about a
    // run that was throttled from its first step.
    let clock = figures.sm_clock_mhz.get().zip(figures.max_sm_clock_mhz);
    let clock = clock.map(|(mean, seen)| (mean, facts.max_sm_clock_mhz.map_or(seen, |most| most.max(seen)).max(1.0)));
    let down = clock.map_or(0.0, |(mean, most)| 1.0 - mean / most);
    let clocks = clock.map(|(mean, most)| {
        let by = if facts.max_sm_clock_mhz.is_some() { "by the driver" } else { "in this run" };
        let times = most / mean;
        format!("multiprocessors at {mean:.0} MHz on average, {most:.0} MHz at most {by}: up to {times:.2}x slower")
    });
    let heat = figures.max_temperature_celsius.map(|celsius| format!("{celsius:.0} C at most"));
    let power = figures.power_watts.get().map(|watts| format!("{watts:.0} W on average"));
    let machine: Vec<String> = heat.into_iter().chain(power).collect();
    let machine = (!machine.is_empty()).then(|| machine.join(", "));

    let lasting = figures.throttled_seconds.iter().filter(|(_, seconds)| share(**seconds) >= MIN_SHARE);
    // The gravest reason that lasted: a moment of heat is not what slows down a run at its power limit. The power limit
    // does not hide a power brake.
    let gravest = lasting.max_by(|(a, a_seconds), (b, b_seconds)| {
        let weight = |reason: &str| Reverse((Cause::of(reason), reason == POWER_CAP));
        weight(a).cmp(&weight(b)).then(a_seconds.total_cmp(b_seconds))
    });
    let Some((reason, seconds)) = gravest else {
        let is_busy = figures.gpu_percent.get()? >= BUSY_GPU_PERCENT;
        if facts.max_sm_clock_mhz.is_none() || down <= DOWN_WITHOUT_REASON || !figures.are_enough() || !is_busy {
            return None;
        }
        let at = percent(1.0 - down);
        let verdict =
            format!("CLOCK THROTTLING: the busy GPU ran at {at} of its highest clock, and the driver does not say why");
        let evidence = [clocks, machine, Some(LOCKED.to_owned())].into_iter().flatten().collect();
        return Some(Finding { evidence, ..finding("throttled_clocks", Severity::Advice, None, verdict) });
    };
    let cause = Cause::of(reason);
    let is_capped = reason == POWER_CAP;
    let (rule, what, remedy) = match cause {
        Cause::Heat => (
            "throttled_thermal",
            "THERMAL THROTTLING",
            "no setting of a recipe cools a GPU: see to its fans, its air, and its neighbours",
        ),
        Cause::Power if is_capped => (
            "throttled_power",
            "POWER THROTTLING",
            "`nvidia-smi -q -d POWER` shows the limit; root may raise it with `nvidia-smi -pl`",
        ),
        Cause::Power => (
            "throttled_power",
            "POWER THROTTLING",
            "the machine asks for it, not the GPU's limit: see to its power supply",
        ),
        Cause::Setting => ("throttled_clocks", "CLOCK THROTTLING", LOCKED),
    };
    let limits = facts.power_limit_watts.zip(facts.default_power_limit_watts).filter(|_| is_capped);
    let severity = match cause {
        Cause::Heat => Severity::Problem,
        // Under full load, a card at its default power limit runs well below its highest clock.
        _ if is_capped && limits.is_none_or(|(limit, usual)| limit >= usual) => Severity::Note,
        _ if down > MUCH_DOWN => Severity::Advice,
        _ => Severity::Note,
    };
    let is_note = severity == Severity::Note;
    let usual = if is_capped && is_note { "; the card does what its power allows" } else { "" };
    let verdict = format!("{what}: {reason} for {} of the time{usual}", percent(share(*seconds)));
    let reasons = figures.throttled_seconds.iter();
    let reasons = reasons.map(|(reason, seconds)| format!("{reason} {}", percent(share(*seconds))));
    let reasons = reasons.collect::<Vec<_>>().join(", ");
    let evidence = [
        Some(format!("share of the samples in {} steps: {reasons}", figures.num_steps())),
        clocks,
        machine,
        limits.map(|(limit, usual)| format!("power limit {limit:.0} W, {usual:.0} W by default")),
        (!is_note).then(|| remedy.to_owned()),
    ];
    let evidence = evidence.into_iter().flatten().collect();
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
            let mut run = gpu_run(move |line: &mut StepMetrics| {
                line.gpu_throttle_shares = line.step.is_multiple_of(2).then(|| [(reason.into(), 1.0)].into());
                line.gpu_sm_clock_mhz = Some(clock);
            });
            run.facts.max_sm_clock_mhz = Some(1980.0);
            (run.facts.power_limit_watts, run.facts.default_power_limit_watts) = (Some(500.0), Some(700.0));
            run
        };
        let hot = throttled(&held("hardware thermal slowdown", 1200.0)).unwrap();
        assert_eq!((hot.rule.as_str(), hot.severity), ("throttled_thermal", Severity::Problem));
        assert!(hot.verdict.starts_with("THERMAL THROTTLING: hardware thermal slowdown for 50%"), "{hot:#?}");
        assert!(hot.evidence.iter().any(|line| line.starts_with("60 C at most, 600 W")), "{hot:#?}");
        // Throttled from the first step to the last: only the driver's figure shows it.
        let capped = throttled(&held("power cap", 1200.0)).unwrap();
        assert_eq!(capped.severity, Severity::Advice);
        assert!(capped.evidence[1].ends_with("1980 MHz at most by the driver: up to 1.65x slower"), "{capped:#?}");
        assert!(capped.evidence.iter().any(|line| line == "power limit 500 W, 700 W by default"), "{capped:#?}");
        assert!(capped.evidence.last().unwrap().contains("`nvidia-smi -pl`"), "{capped:#?}");
        let brake = throttled(&held("power brake", 1200.0)).unwrap();
        assert_eq!((brake.rule.as_str(), brake.severity), ("throttled_power", Severity::Advice));
        assert!(brake.evidence.last().unwrap().ends_with("see to its power supply"), "{brake:#?}");
        let mut unknown = held("power cap", 1200.0);
        unknown.facts.max_sm_clock_mhz = None;
        assert_eq!(throttled(&unknown).unwrap().severity, Severity::Note);
        assert_eq!(throttled(&held("power cap", 1950.0)).unwrap().severity, Severity::Note);
        assert_eq!(throttled(&held("application clocks", 1200.0)).unwrap().rule, "throttled_clocks");
        assert!(throttled(&gpu_run(|_| {})).is_none());
    }

    #[test]
    fn a_card_at_its_usual_power_limit_does_what_its_power_allows() {
        let mut stock = gpu_run(|line| {
            line.gpu_throttle_shares = Some([("power cap".into(), 1.0)].into());
            line.gpu_sm_clock_mhz = Some(1400.0);
        });
        stock.facts.max_sm_clock_mhz = Some(1980.0);
        for limits in [(Some(700.0), Some(700.0)), (Some(750.0), Some(700.0)), (None, Some(700.0)), (None, None)] {
            (stock.facts.power_limit_watts, stock.facts.default_power_limit_watts) = limits;
            let found = throttled(&stock).unwrap();
            assert_eq!((found.rule.as_str(), found.severity), ("throttled_power", Severity::Note), "{limits:?}");
            assert!(found.verdict.ends_with("100% of the time; the card does what its power allows"), "{found:#?}");
            assert!(!found.evidence.iter().any(|line| line.contains("nvidia-smi")), "{found:#?}");
        }
        stock.facts.power_limit_watts = Some(699.0);
        stock.facts.default_power_limit_watts = Some(700.0);
        assert_eq!(throttled(&stock).unwrap().severity, Severity::Advice);
        let mut braked = gpu_run(|line| {
            line.gpu_throttle_shares = Some([("power brake".into(), 1.0), ("power cap".into(), 1.0)].into());
            line.gpu_sm_clock_mhz = Some(1400.0);
        });
        braked.facts = stock.facts;
        let found = throttled(&braked).unwrap();
        assert!(found.severity == Severity::Advice && found.verdict.contains(": power brake for 100%"), "{found:#?}");
    }

    #[test]
    fn clocks_that_are_down_without_a_reason_are_told_of_where_the_gpu_is_busy() {
        let mut locked = gpu_run(|line| line.gpu_sm_clock_mhz = Some(1200.0));
        assert!(throttled(&locked).is_none(), "nobody knows what it could run at");
        locked.facts.max_sm_clock_mhz = Some(1980.0);
        let found = throttled(&locked).unwrap();
        assert_eq!((found.rule.as_str(), found.severity), ("throttled_clocks", Severity::Advice));
        assert!(found.verdict.contains("ran at 61% of its highest clock"), "{found:#?}");
        let mut resting = gpu_run(|line| {
            (line.gpu_sm_clock_mhz, line.gpu_utilization_percent) = (Some(1200.0), Some(40.0));
        });
        resting.facts.max_sm_clock_mhz = Some(1980.0);
        assert!(throttled(&resting).is_none());
        let mut usual = gpu_run(|line| line.gpu_sm_clock_mhz = Some(1750.0));
        usual.facts.max_sm_clock_mhz = Some(1980.0);
        assert!(throttled(&usual).is_none());
    }

    #[test]
    fn what_was_seen_in_few_samples_names_neither_the_finding_nor_its_share() {
        let mostly_power = |hot: f64| {
            gpu_run(move |line| {
                let shares = [("power cap".to_owned(), 1.0), ("thermal slowdown".to_owned(), hot)];
                line.gpu_throttle_shares = Some(shares.into());
            })
        };
        // A flicker: one of the hundred samples of each step.
        let flicker = throttled(&mostly_power(0.01)).unwrap();
        assert_eq!((flicker.rule.as_str(), flicker.severity), ("throttled_power", Severity::Note));
        assert_eq!(
            flicker.verdict,
            "POWER THROTTLING: power cap for 100% of the time; the card does what its power allows"
        );
        assert_eq!(flicker.evidence[0], "share of the samples in 100 steps: power cap 100%, thermal slowdown 1.0%");
        let hot = throttled(&mostly_power(0.3)).unwrap();
        assert_eq!(hot.verdict, "THERMAL THROTTLING: thermal slowdown for 30% of the time");
        let rarely = gpu_run(|line| {
            line.gpu_throttle_shares = (line.step == 50).then(|| [("power cap".into(), 1.0)].into());
        });
        assert!(throttled(&rarely).is_none());
    }
}
