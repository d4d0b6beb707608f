//! Axes: round marks, and numbers with their units.

use serde::Serialize;

use crate::util::text::thousands;

/// The unit of a chart's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Unit {
    /// No unit: a loss, a norm.
    #[default]
    Plain,
    /// A very small number without unit: a learning rate.
    Scientific,
    /// Whole counts: steps, tokens.
    Count,
    TokensPerSecond,
    Seconds,
    Bytes,
    BytesPerSecond,
    Percent,
    Watts,
    Celsius,
    Megahertz,
}

/// The divisor of displayed numbers, and the unit written after them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Scale {
    pub(super) divisor: f64,
    pub(super) suffix: &'static str,
}

impl Unit {
    /// The scale that suits numbers up to `largest` best.
    pub(super) fn scale(self, largest: f64) -> Scale {
        const KIB: f64 = 1024.0;
        const MIB: f64 = KIB * KIB;
        const GIB: f64 = KIB * MIB;
        let (divisor, suffix) = match self {
            Self::Plain | Self::Scientific | Self::Count => (1.0, ""),
            Self::TokensPerSecond => (1.0, " tokens/s"),
            Self::Seconds if largest < 1e-3 => (1e-6, " µs"),
            Self::Seconds if largest < 1.0 => (1e-3, " ms"),
            Self::Seconds if largest < 600.0 => (1.0, " s"),
            Self::Seconds if largest < 36_000.0 => (60.0, " min"),
            Self::Seconds => (3600.0, " h"),
            Self::Bytes if largest < MIB => (KIB, " KiB"),
            Self::Bytes if largest < GIB => (MIB, " MiB"),
            Self::Bytes => (GIB, " GiB"),
            Self::BytesPerSecond if largest < MIB => (KIB, " KiB/s"),
            Self::BytesPerSecond if largest < GIB => (MIB, " MiB/s"),
            Self::BytesPerSecond => (GIB, " GiB/s"),
            Self::Percent => (1.0, " %"),
            Self::Watts => (1.0, " W"),
            Self::Celsius => (1.0, " °C"),
            Self::Megahertz => (1.0, " MHz"),
        };
        Scale { divisor, suffix }
    }

    /// A number with its unit, with three significant digits, or four where it has no unit.
    pub(super) fn text(self, value: f64) -> String {
        let Scale { divisor, suffix } = self.scale(value.abs());
        match self {
            _ if !value.is_finite() => "–".to_owned(),
            Self::Scientific => scientific(value),
            Self::Count => thousands(value),
            Self::Percent => format!("{value:.1}{suffix}"),
            Self::Plain => significant(value, 4),
            _ => format!("{}{suffix}", significant(value / divisor, 3)),
        }
    }
}

/// Rounded to this many significant digits, whole thousands grouped. With four digits: `12,345`, `1.353`, `0.01234`.
fn significant(value: f64, digits: i32) -> String {
    let magnitude = if value == 0.0 { 0.0 } else { value.abs().log10().floor() };
    if magnitude >= 3.0 {
        return thousands(value);
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and 12")]
    let decimals = (f64::from(digits - 1) - magnitude).clamp(0.0, 12.0) as usize;
    without_zeros(&format!("{value:.decimals$}")).to_owned()
}

/// `8e-3`, `1.5e-4`, `0`.
fn scientific(value: f64) -> String {
    let text = format!("{value:.3e}");
    match text.split_once('e') {
        Some((mantissa, exponent)) if value != 0.0 => format!("{}e{exponent}", without_zeros(mantissa)),
        _ => "0".to_owned(),
    }
}

/// A number without zeros at the end of its decimals.
fn without_zeros(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

/// A range of numbers with round marks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Axis {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) ticks: Vec<f64>,
    pub(super) scale: Scale,
    is_log: bool,
    unit: Unit,
    step: f64,
}

impl Axis {
    /// The axis from one number to another, widened to round marks, about `num_ticks` of them.
    pub(super) fn rounded(low: f64, high: f64, unit: Unit, num_ticks: f64) -> Self {
        let mut axis = Self::exact(low, high, unit, num_ticks);
        let step = axis.step;
        axis.low = (low / step + 1e-9).floor() * step;
        axis.high = ((high / step - 1e-9).ceil() * step).max(axis.low + step);
        axis.mark();
        axis
    }

    /// The axis from one number to another, not widened, with round marks inside.
    pub(super) fn exact(low: f64, high: f64, unit: Unit, num_ticks: f64) -> Self {
        let scale = unit.scale(high.abs().max(low.abs()));
        let high = if high > low { high } else { low + if low == 0.0 { 1.0 } else { low.abs() * 0.1 } };
        let mut step = round_step((high - low) / scale.divisor / num_ticks);
        if unit == Unit::Count {
            step = step.max(1.0).round();
        }
        let mut axis = Self { low, high, ticks: Vec::new(), scale, is_log: false, unit, step: step * scale.divisor };
        axis.mark();
        axis
    }

    /// The logarithmic axis between two positive numbers, with marks at 1, 2 and 5 times powers of ten.
    pub(super) fn logarithmic(low: f64, high: f64, unit: Unit) -> Self {
        let (low, high) = (low / 1.1, high * 1.1);
        #[expect(clippy::cast_possible_truncation, reason = "exponents")]
        let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        let factors: &[f64] = if last - first > 3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let marks = (first..=last).flat_map(|power| factors.iter().map(move |factor| factor * 10_f64.powi(power)));
        let ticks = marks.filter(|tick| (low..=high).contains(tick)).collect();
        Self { low, high, ticks, scale: unit.scale(high), is_log: true, unit, step: 1.0 }
    }

    fn mark(&mut self) {
        // Adding 0 makes -0, which would show its sign, 0.
        let first = (self.low / self.step - 1e-9).ceil() + 0.0;
        let last = (self.high / self.step + 1e-9).floor();
        let marks = std::iter::successors(Some(first), |mark| Some(mark + 1.0));
        self.ticks = marks.take_while(|mark| *mark <= last).map(|mark| mark * self.step).collect();
    }

    /// Position of a number: 0 at the low end, 1 at the high end.
    pub(super) fn position(&self, value: f64) -> f64 {
        if self.is_log {
            return (value / self.low).ln() / (self.high / self.low).ln();
        }
        (value - self.low) / (self.high - self.low)
    }

    /// The marks: their positions in percent, and their texts without the unit.
    pub(super) fn marks(&self) -> Vec<(f64, String)> {
        let percent = |tick| (1e4 * self.position(tick)).round() / 100.0;
        self.ticks.iter().map(|tick| (percent(*tick), self.label(*tick))).collect()
    }

    fn label(&self, tick: f64) -> String {
        let (value, step) = (tick / self.scale.divisor, self.step / self.scale.divisor);
        if self.unit == Unit::Scientific {
            return scientific(value);
        }
        if self.is_log {
            return significant(value, 1);
        }
        if step >= 1.0 && step.fract() < 1e-9 {
            return thousands(value);
        }
        // As many decimals as it takes to tell two marks apart.
        let is_apart = |decimals: &usize| {
            let power = 10_f64.powi(i32::try_from(*decimals).unwrap_or(0));
            (step * power - (step * power).round()).abs() < 1e-6
        };
        let decimals = (0..12).find(is_apart).unwrap_or(12);
        format!("{value:.decimals$}")
    }
}

/// The least of 1, 2, 2.5, 5 times a power of ten that is at least `rough`.
fn round_step(rough: f64) -> f64 {
    let power = 10_f64.powf(rough.max(f64::MIN_POSITIVE).log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0].into_iter().find(|factor| factor * power >= rough * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<String> {
        axis.marks().into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn marks_are_round_and_surround_the_numbers() {
        let loss = Axis::rounded(0.317, 9.9877, Unit::Plain, 4.0);
        assert_eq!((loss.low, loss.high), (0.0, 10.0));
        assert_eq!(labels(&loss), ["0.0", "2.5", "5.0", "7.5", "10.0"]);
        let memory = Axis::rounded(0.0, 1411.0 * 1_048_576.0, Unit::Bytes, 4.0);
        assert_eq!(memory.scale.suffix, " GiB");
        assert_eq!(labels(&memory), ["0.0", "0.5", "1.0", "1.5"]);
        let rate = Axis::rounded(0.0, 8e-3, Unit::Scientific, 4.0);
        assert_eq!(labels(&rate), ["0", "2e-3", "4e-3", "6e-3", "8e-3"]);
        let steps = Axis::exact(1.0, 200.0, Unit::Count, 5.0);
        assert_eq!((steps.low, steps.high), (1.0, 200.0));
        assert_eq!(labels(&steps), ["50", "100", "150", "200"]);
        assert_eq!(labels(&Axis::exact(1.0, 2.0, Unit::Count, 5.0)), ["1", "2"]);
    }

    #[test]
    fn equal_quotients_are_equally_far_apart_on_a_logarithmic_axis() {
        let axis = Axis::logarithmic(0.3, 10.0, Unit::Plain);
        assert_eq!(labels(&axis), ["0.5", "1", "2", "5", "10"]);
        let [half, one, two] = [0.5, 1.0, 2.0].map(|value| axis.position(value));
        assert!((one - half - (two - one)).abs() < 1e-12 && half > 0.0 && axis.position(10.0) < 1.0);
    }

    #[test]
    fn one_number_alone_has_an_axis_too() {
        for value in [0.0, 1.0, -3.5, 1e-9, 1e12] {
            let axis = Axis::rounded(value, value, Unit::Plain, 4.0);
            assert!(axis.low <= value && value <= axis.high && axis.low < axis.high, "{axis:?}");
            assert!((1..20).contains(&axis.ticks.len()), "{axis:?}");
        }
    }

    #[test]
    fn numbers_carry_their_unit_in_the_scale_that_reads_best() {
        let texts = [
            Unit::Seconds.text(0.0213),
            Unit::Seconds.text(75.27),
            Unit::Seconds.text(7200.0),
            Unit::Bytes.text(45.0 * 1_048_576.0),
            Unit::TokensPerSecond.text(17_748.3),
            Unit::Plain.text(1.35312),
            Unit::Scientific.text(1.5e-4),
            Unit::Percent.text(96.0),
            Unit::Plain.text(f64::NAN),
        ];
        let expected = ["21.3 ms", "75.3 s", "120 min", "45 MiB", "17,748 tokens/s", "1.353", "1.5e-4", "96.0 %", "–"];
        assert_eq!(texts, expected);
    }
}
