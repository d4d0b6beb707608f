//! Tokens that are computed or read for nothing.

use crate::insight::diagnosis::text::{change, faster, finding, percent};
use crate::insight::diagnosis::{Finding, Run, Severity};
use crate::util::stats::{as_f64, as_u64};
use crate::util::text::{bytes, with_commas};

/// Share of the tokens from which padding is reported.
const MIN_PADDING: f64 = 0.2;
/// Share of the rows from which a fault of theirs is reported.
const MIN_ROWS: f64 = 0.01;

/// Rows are padded to the longest of their micro-batch, and that one to a round length.
pub(super) fn padding(run: &Run) -> Option<Finding> {
    let Run { facts, figures } = run;
    let share = figures.all.padding_share().unwrap_or(0.0);
    if share < MIN_PADDING {
        return None;
    }
    let (padding, all) = (figures.all.padding_tokens, figures.all.tokens + figures.all.padding_tokens);
    let rows = facts.train.micro_batch_size;
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
    let changes = if facts.data.packing { Vec::new() } else { vec![change("data.packing", false, true, expected)] };
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
    let max_length = facts.data.max_length as u64;
    let longest = figures.longest_row_tokens.filter(|longest| *longest > max_length);
    evidence.extend(longest.map(|longest| format!("the longest had {} tokens", with_commas(longest))));
    let positions = facts.max_positions;
    let to = longest.unwrap_or(2 * max_length).next_multiple_of(64).min(positions);
    let mut changes = Vec::new();
    if to > max_length {
        let what = match longest {
            Some(longest) if longest <= to => format!("all {rows} rows whole"),
            Some(_) => format!("fewer than {cut} of {rows} rows cut: the model has {positions} positions"),
            None => format!("fewer than {cut} of {rows} rows cut"),
        };
        let expected = format!("{what}; {}", memory_for(run, as_f64(to) / as_f64(max_length)));
        changes.push(change("data.max_length", max_length, to, expected));
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
    use crate::insight::diagnosis::tests::{finds, gpu_run, run};

    #[test]
    fn padding_that_is_computed_costs_its_share_of_forward_and_backward() {
        let mut padded = gpu_run(|line| (line.tokens, line.padding_tokens) = (1000, Some(3000)));
        // 0.9 s of a step of 1 s are forward and backward.
        let costly = [
            "padding problem",
            "PADDING: 75% of the tokens computed are padding",
            "303,000 of 404,000 tokens in micro-batches of 4 rows",
            "`data.packing` false -> true: about 3.08x (a step 1.000 s -> 0.325 s) for the same tokens",
        ];
        finds(padding(&padded), &costly);
        padded.facts.data.packing = true;
        assert!(padding(&padded).unwrap().changes.is_empty());
        padded.facts.leaves_padding_out = true;
        finds(padding(&padded), &["padding note", "it costs no time here"]);
        finds(padding(&gpu_run(|_| {})), &[]);
    }

    #[test]
    fn cut_rows_are_reported_with_the_length_that_would_hold_them() {
        let mut cut = run(|line| line.truncated_rows = Some(1));
        let unknown =
            ["truncation advice", "101 of 808 rows were cut", "`data.max_length` 1024 -> 2048: fewer than 101"];
        finds(truncation(&cut), &unknown);
        cut.figures.longest_row_tokens = Some(1500);
        let longest = [
            "the longest had 1,500 tokens",
            "`data.max_length` 1024 -> 1536: all 808 rows whole; the longest micro-batches take 1.5x the memory, about 1.0 \
             GiB more, of which 8.0 GiB were free at the least",
        ];
        finds(truncation(&cut), &longest);
        // Not beyond the model's positions.
        cut.facts.max_positions = 1200;
        finds(truncation(&cut), &["1024 -> 1200: fewer than 101 of 808 rows cut: the model has 1200 positions"]);
        cut.facts.max_positions = 1024;
        finds(truncation(&cut), &["the model has 1024 positions: longer rows would have to be split"]);
        assert!(truncation(&cut).unwrap().changes.is_empty());
        finds(truncation(&run(|_| {})), &[]);
    }
}
