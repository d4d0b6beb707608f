//! Tokens that are computed or read for nothing.

use crate::diagnosis::text::{change, faster, finding, percent};
use crate::diagnosis::{Finding, Run, Severity};
use crate::stats::{as_f64, as_u64};
use crate::text::{bytes, with_commas};

/// Share of the tokens from which padding is reported.
const MIN_PADDING: f64 = 0.2;
/// Share of the rows from which a fault of theirs is reported.
const MIN_ROWS: f64 = 0.01;

/// Short rows are padded to the longest of their micro-batch.
pub(super) fn padding(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let share = figures.padding_share();
    if share < MIN_PADDING {
        return None;
    }
    let (padding, all) = (figures.padding_tokens, figures.tokens + figures.padding_tokens);
    let rows = facts.micro_batch_size;
    let evidence =
        vec![format!("{} of {} tokens in micro-batches of {rows} rows", with_commas(padding), with_commas(all))];
    if facts.leaves_padding_out {
        let verdict =
            format!("PADDING: {} of the tokens, which this device leaves out: it costs no time here", percent(share));
        return Some(Finding { evidence, ..finding("padding", Severity::Note, None, verdict) });
    }
    let compute = figures.forward_backward_seconds * share;
    let of_time = figures.are_enough().then(|| figures.share_of_steps(compute));
    let step = figures.mean_step_seconds();
    let expected = match of_time {
        Some(_) => format!("{} for the same tokens", faster(step, step - figures.per_step(compute))),
        None => "the same without padding".to_owned(),
    };
    let verdict = format!("PADDING: {} of the tokens computed are padding", percent(share));
    let changes = if facts.packing { Vec::new() } else { vec![change("data.packing", false, true, expected)] };
    let severity = if of_time.is_some_and(|share| share >= 0.25) { Severity::Problem } else { Severity::Advice };
    Some(Finding { evidence, changes, ..finding("padding", severity, of_time, verdict) })
}

/// Rows are longer than training keeps.
pub(super) fn truncation(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let share = as_f64(figures.truncated_rows) / as_f64(figures.rows.max(1));
    if share < MIN_ROWS {
        return None;
    }
    let (cut, rows) = (figures.truncated_rows, figures.rows);
    let verdict =
        format!("TRUNCATION: {} of the rows are longer than `data.max_length` and lose their end", percent(share));
    let mut evidence = vec![format!("{cut} of {rows} rows were cut")];
    let longest = figures.longest_row_tokens.filter(|longest| *longest > facts.max_length);
    evidence.extend(longest.map(|longest| format!("the longest had {} tokens", with_commas(longest))));
    let positions = facts.max_positions;
    let to = longest.unwrap_or(2 * facts.max_length).next_multiple_of(64).min(positions);
    let mut changes = Vec::new();
    if to > facts.max_length {
        let what = match longest {
            Some(longest) if longest <= to => format!("all {rows} rows whole"),
            Some(_) => format!("fewer than {cut} of {rows} rows cut: the model has {positions} positions"),
            None => format!("fewer than {cut} of {rows} rows cut"),
        };
        let expected = format!("{what}; {}", memory_for(run, as_f64(to) / as_f64(facts.max_length.max(1))));
        changes.push(change("data.max_length", facts.max_length, to, expected));
    } else {
        evidence.push(format!("the model has {positions} positions: longer rows would have to be split beforehand"));
    }
    Some(Finding { evidence, changes, ..finding("truncation", Severity::Advice, None, verdict) })
}

/// Memory of micro-batches whose rows are `times` as long.
fn memory_for(run: &Run, times: f64) -> String {
    let takes = format!("the longest micro-batches take {times:.1}x the memory");
    let Some((doubling, free)) = run.facts.doubling_bytes.zip(run.free_bytes()) else { return takes };
    let more = bytes(as_u64((times - 1.0) * as_f64(doubling)));
    format!("{takes}, about {more} more, of which {} were free at the least", bytes(free))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::tests::{gpu_run, run};

    #[test]
    fn padding_that_is_computed_costs_its_share_of_forward_and_backward() {
        let padded = gpu_run(|line| (line.tokens, line.padding_tokens) = (1000, Some(3000)));
        let found = padding(&padded).unwrap();
        assert_eq!(
            (found.severity, found.verdict.as_str()),
            (Severity::Problem, "PADDING: 75% of the tokens computed are padding")
        );
        // 0.9 s of a step of 1 s are forward and backward.
        assert_eq!(found.changes[0].expected, "about 3.08x (a step 1.000 s -> 0.325 s) for the same tokens");
        let mut packed = padded;
        packed.facts.packing = true;
        assert!(padding(&packed).unwrap().changes.is_empty());
        assert!(padding(&gpu_run(|_| {})).is_none());
    }

    #[test]
    fn padding_that_is_left_out_is_a_note() {
        let mut padded = run(|line| (line.tokens, line.padding_tokens) = (1000, Some(3000)));
        padded.facts.leaves_padding_out = true;
        assert_eq!(padding(&padded).unwrap().severity, Severity::Note);
    }

    #[test]
    fn cut_rows_are_told_of_with_the_length_that_would_hold_them() {
        let mut cut = run(|line| line.truncated_rows = Some(1));
        let found = truncation(&cut).unwrap();
        assert_eq!((found.severity, found.changes[0].to.as_str()), (Severity::Advice, "2048"));
        assert_eq!(found.evidence, ["101 of 808 rows were cut"], "how long they are is not known yet");
        cut.figures.longest_row_tokens = Some(1500);
        let found = truncation(&cut).unwrap();
        assert_eq!(found.changes[0].to, "1536");
        let memory = "take 1.5x the memory, about 1.0 GiB more, of which 8.0 GiB were free at the least";
        assert!(found.changes[0].expected.ends_with(memory), "{found:#?}");
        // Not beyond the model's positions.
        cut.facts.max_positions = 1200;
        let found = truncation(&cut).unwrap();
        assert_eq!(found.changes[0].to, "1200");
        assert!(
            found.changes[0].expected.starts_with("fewer than 101 of 808 rows cut: the model has 1200"),
            "{found:#?}"
        );
        cut.facts.max_positions = 1024;
        let found = truncation(&cut).unwrap();
        assert!(found.changes.is_empty() && found.evidence[2].starts_with("the model has 1024"), "{found:#?}");
        assert!(truncation(&run(|_| {})).is_none());
    }
}
