//! Steps on a GPU: splits step times into parts also where the parts were not measured.

use super::columns::Columns;

/// Work of the device, and handing it over.
pub(super) const OF_DEVICE: [&str; 4] =
    ["host_to_device_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds"];

/// The parts of [`OF_DEVICE`] of each step; `None` where no step measures forward and backward apart. Only some steps
/// wait for the GPU at the end of each part. In the others a part's time is only that of launching it, so their sum is
/// split as in the last step that waited; before the first such step, as in that one.
pub(super) fn of_device(steps: &Columns) -> Option<[Vec<f64>; 4]> {
    let forward = steps.get("forward_seconds")?;
    let empty = vec![f64::NAN; steps.len()];
    let column = |name: &str| steps.get(name).unwrap_or(&empty);
    let (columns, passes) = (OF_DEVICE.map(column), column("forward_backward_seconds"));
    let finite = |value: f64| if value.is_finite() { value } else { 0.0 };
    let measured = |at: usize| columns.map(|column| finite(column[at]));
    let mut last = measured(forward.iter().position(|seconds| seconds.is_finite())?);
    let mut parts = OF_DEVICE.map(|_| Vec::with_capacity(steps.len()));
    for at in 0..steps.len() {
        let values = if forward[at].is_finite() {
            last = measured(at);
            last
        } else {
            let [host_to_device, _, _, optimizer] = measured(at);
            let sum = host_to_device + finite(passes[at]) + optimizer;
            let whole = last.iter().sum::<f64>();
            last.map(|part| if whole > 0.0 { sum * part / whole } else { 0.0 })
        };
        parts.iter_mut().zip(values).for_each(|(part, value)| part.push(value));
    }
    Some(parts)
}

/// How many steps are split like others; empty where all were measured.
pub(super) fn split_note(steps: &Columns) -> String {
    let forward = steps.get("forward_seconds").unwrap_or_default();
    match forward.iter().filter(|seconds| seconds.is_finite()).count() {
        measured if measured == forward.len() => String::new(),
        measured => format!(
            "The device was waited for at the end of every part in {measured} of {} steps; what it took in the others is \
             split as in these.",
            forward.len()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::stack::parts;

    fn columns(lines: &[&str]) -> Columns {
        let mut columns = Columns::default();
        lines.iter().for_each(|line| columns.push(&serde_json::from_str(line).unwrap()));
        columns
    }

    #[test]
    fn steps_that_were_not_waited_for_are_split_as_those_that_were() {
        let line = |passes: f64, optimizer: f64, forward: Option<f64>| {
            let mut line = serde_json::json!({
                "wall_seconds": 0.01 + passes + optimizer,
                "host_to_device_seconds": 0.01,
                "forward_backward_seconds": passes,
                "optimizer_seconds": optimizer,
                "other_seconds": 0.0,
            });
            if let Some(forward) = forward {
                (line["forward_seconds"], line["backward_seconds"]) = (forward.into(), (passes - forward).into());
            }
            line.to_string()
        };
        // Launched at once, and waited for at the end of the backward; the third step waited at every end.
        let lines =
            [line(0.98, 0.01, None), line(0.38, 0.01, None), line(0.8, 0.19, Some(0.3)), line(1.98, 0.01, None)];
        let steps = columns(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        let told: Vec<(&str, Vec<f64>)> = parts(&steps)
            .into_iter()
            .map(|part| (part.name, part.seconds.iter().map(|seconds| (seconds * 1e6).round() / 1e6).collect()))
            .collect();
        let expected = [
            ("forward", vec![0.3, 0.12, 0.3, 0.6]),
            ("backward", vec![0.5, 0.2, 0.5, 1.0]),
            ("optimizer", vec![0.19, 0.076, 0.19, 0.38]),
            ("host to device", vec![0.01, 0.004, 0.01, 0.02]),
        ];
        assert_eq!(told, expected);
        assert!(split_note(&steps).contains("in 1 of 4 steps"), "{}", split_note(&steps));
        assert_eq!(split_note(&columns(&[&lines[2]])), "");
    }
}
