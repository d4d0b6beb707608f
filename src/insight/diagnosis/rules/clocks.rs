//! Throttled clocks.

use std::cmp::Reverse;

use super::compute::BUSY_GPU_PERCENT;
use crate::insight::diagnosis::text::{finding, percent};
use crate::insight::diagnosis::{Finding, Run, Severity};

/// Share of the time from which throttling is reported.
const MIN_SHARE: f64 = 0.1;
/// Lost share of the clock from which throttling is worth a change,
const MUCH_DOWN: f64 = 0.1;
/// and from which it is reported where the driver names no reason: many cards never reach their highest clock.
const DOWN_WITHOUT_REASON: f64 = 0.25;

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

    /// Its rule, its name, and what helps. `is_capped`: it is the GPU's own limit of power.
    fn told(self, is_capped: bool) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Heat => (
                "throttled_thermal",
                "THERMAL THROTTLING",
                "no setting of a recipe cools a GPU: see to its fans, its air, and its neighbours",
            ),
            Self::Power if is_capped => (
                "throttled_power",
                "POWER THROTTLING",
                "`nvidia-smi -q -d POWER` shows the limit; root may raise it with `nvidia-smi -pl`",
            ),
            Self::Power => (
                "throttled_power",
                "POWER THROTTLING",
                "the machine asks for it, not the GPU's limit: see to its power supply",
            ),
            Self::Setting => ("throttled_clocks", "CLOCK THROTTLING", LOCKED),
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
        // A GPU that idles may have low clocks for that.
        let is_busy = figures.counted.gpu_utilization_percent.get()? >= BUSY_GPU_PERCENT;
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
    let (rule, what, remedy) = cause.told(is_capped);
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
    use crate::insight::diagnosis::tests::{finds, gpu_run};

    /// A run throttled for these shares of every step, on a card of at most 1980 MHz and these power limits.
    fn held(reasons: &[(&str, f64)], clock: f64, limits: [Option<f64>; 2]) -> Run {
        let mut run = gpu_run(|line| {
            line.gpu_throttle_shares = Some(reasons.iter().map(|(reason, share)| ((*reason).into(), *share)).collect());
            line.gpu_sm_clock_mhz = Some(clock);
        });
        run.facts.max_sm_clock_mhz = Some(1980.0);
        [run.facts.power_limit_watts, run.facts.default_power_limit_watts] = limits;
        run
    }

    #[test]
    fn a_cause_has_its_name_its_weight_and_its_remedy() {
        let (lowered, usual) = ([Some(500.0), Some(700.0)], [Some(700.0); 2]);
        let (heat, cap) = ("thermal slowdown", ("power cap", 1.0));
        let check =
            |reasons: &[_], clock, limits, parts: &[&str]| finds(throttled(&held(reasons, clock, limits)), parts);
        let hot = ["throttled_thermal problem", "THERMAL THROTTLING: thermal slowdown for 50% of", "its neighbours"];
        check(&[(heat, 0.5)], 1200.0, lowered, &hot);
        // Throttled from the first step to the last: only the driver's figure shows it.
        let capped = [
            "throttled_power advice",
            "POWER THROTTLING: power cap for 100% of the time",
            "share of the samples in 100 steps: power cap 100%",
            "multiprocessors at 1200 MHz on average, 1980 MHz at most by the driver: up to 1.65x slower",
            "60 C at most, 600 W on average",
            "power limit 500 W, 700 W by default",
            "`nvidia-smi -pl`",
        ];
        check(&[cap], 1200.0, lowered, &capped);
        let allowed = ["throttled_power note", "power cap for 100% of the time; the card does what its power allows"];
        check(&[cap], 1950.0, lowered, &allowed);
        for limits in [usual, [Some(750.0), Some(700.0)], [None, Some(700.0)], [None; 2]] {
            check(&[cap], 1400.0, limits, &allowed);
        }
        let brake = ["throttled_power advice", "power brake for 100%", "see to its power supply"];
        check(&[("power brake", 1.0), cap], 1400.0, usual, &brake);
        check(&[("application clocks", 1.0)], 1200.0, usual, &["throttled_clocks advice", "`nvidia-smi -rgc -rac`"]);
        // A flicker of heat, one of a hundred samples, names neither the finding nor its share.
        check(&[cap, (heat, 0.01)], 1400.0, usual, &["throttled_power note", "power cap 100%, thermal slowdown 1.0%"]);
        check(&[cap, (heat, 0.3)], 1400.0, usual, &["throttled_thermal problem", "thermal slowdown for 30% of"]);
        check(&[("power cap", 0.05)], 1700.0, usual, &[]);
        let mut unknown = held(&[cap], 1200.0, lowered);
        unknown.facts.max_sm_clock_mhz = None;
        finds(throttled(&unknown), &["throttled_power note", "1200 MHz at most in this run"]);
    }

    #[test]
    fn clocks_that_are_down_without_a_reason_are_reported_where_the_gpu_is_busy() {
        let down = ["throttled_clocks advice", "the busy GPU ran at 61% of its highest clock", "-rgc -rac`"];
        finds(throttled(&held(&[], 1200.0, [None; 2])), &down);
        finds(throttled(&held(&[], 1750.0, [None; 2])), &[]);
        let mut resting = gpu_run(|line| {
            (line.gpu_sm_clock_mhz, line.gpu_utilization_percent) = (Some(1200.0), Some(40.0));
        });
        finds(throttled(&resting), &[]);
        resting.facts.max_sm_clock_mhz = Some(1980.0);
        finds(throttled(&resting), &[]);
    }
}
