//! How ranks share the micro-batches of a step.

use std::cmp::Reverse;
use std::ops::Range;

use crate::data::batch::Batch;

/// Some rows of a micro-batch of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowShare {
    /// Index of the micro-batch in the step.
    pub micro_batch: usize,
    /// Its rows.
    pub rows: Range<usize>,
}

/// The parts that each of `num_ranks` ranks takes: whole micro-batches where their number is a multiple of the ranks', else
/// each is cut between rows, unless its rows are compared with one another. They are dealt out by tokens, the largest first,
/// to no rank more parts than to another by two. With one rank, the micro-batches as they are.
#[must_use]
pub fn shares(micro_batches: &[Batch], num_ranks: usize) -> Vec<Vec<RowShare>> {
    let is_whole = micro_batches.iter().any(|batch| !batch.answers.is_empty());
    let num_parts = if is_whole { 1 } else { num_parts(micro_batches.len(), num_ranks) };
    let parts: Vec<(RowShare, usize)> = micro_batches
        .iter()
        .enumerate()
        .flat_map(|(micro_batch, batch)| {
            cut(&batch.row_lengths, num_parts).into_iter().map(move |rows| {
                let tokens = batch.row_lengths[rows.clone()].iter().sum();
                (RowShare { micro_batch, rows }, tokens)
            })
        })
        .collect();
    let most_parts = parts.len().div_ceil(num_ranks);
    let mut by_tokens: Vec<usize> = (0..parts.len()).collect();
    by_tokens.sort_by_key(|index| Reverse(parts[*index].1));
    let mut taken: Vec<(usize, Vec<usize>)> = vec![(0, Vec::new()); num_ranks];
    for index in by_tokens {
        let free = taken.iter_mut().filter(|(_, indices)| indices.len() < most_parts);
        if let Some((tokens, indices)) = free.min_by_key(|(tokens, indices)| (*tokens, indices.len())) {
            *tokens += parts[index].1;
            indices.push(index);
        }
    }
    let in_order = |(_, mut indices): (usize, Vec<usize>)| {
        indices.sort_unstable();
        indices.into_iter().map(|index| parts[index].0.clone()).collect()
    };
    taken.into_iter().map(in_order).collect()
}

/// Cuts rows of these lengths into at most `num_parts` runs of about as many tokens; rows without tokens at the end are left out
/// where there is more than one run.
fn cut(row_lengths: &[usize], num_parts: usize) -> Vec<Range<usize>> {
    if num_parts == 1 {
        return std::iter::once(0..row_lengths.len()).collect();
    }
    let all: usize = row_lengths.iter().sum();
    let (mut parts, mut start, mut tokens) = (Vec::new(), 0, 0);
    for (row, length) in row_lengths.iter().enumerate() {
        let rows_left = row_lengths[row..].iter().filter(|length| **length > 0).count();
        // A row belongs to the part in which its middle lies; the last parts have a row each at least.
        let is_beyond = (2 * tokens + length) * num_parts > 2 * all * (parts.len() + 1);
        let is_scarce = rows_left + parts.len() < num_parts;
        if row > start && parts.len() + 1 < num_parts && *length > 0 && (is_beyond || is_scarce) {
            parts.push(start..row);
            start = row;
        }
        tokens += length;
    }
    let end = row_lengths.iter().rposition(|length| *length > 0).map_or(start, |last| last + 1);
    parts.extend((end > start).then_some(start..end));
    parts
}

/// Parts of a micro-batch that has as many rows, so that every rank can have as many.
#[must_use]
pub fn num_parts(num_micro_batches: usize, num_ranks: usize) -> usize {
    num_ranks / divisor(num_micro_batches, num_ranks)
}

/// The greatest common divisor; `b` is above 0.
fn divisor(a: usize, b: usize) -> usize {
    if a == 0 { b } else { divisor(b % a, a) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batches(lengths: &[&[usize]]) -> Vec<Batch> {
        let of = |lengths: &&[usize]| Batch { row_lengths: lengths.to_vec(), ..Batch::default() };
        lengths.iter().map(of).collect()
    }

    fn tokens(shares: &[Vec<RowShare>], batches: &[Batch]) -> Vec<usize> {
        let of = |part: &RowShare| batches[part.micro_batch].row_lengths[part.rows.clone()].iter().sum::<usize>();
        shares.iter().map(|parts| parts.iter().map(of).sum()).collect()
    }

    #[test]
    fn one_rank_takes_the_micro_batches_as_they_are() {
        let batches = batches(&[&[3, 5], &[2, 0]]);
        let whole = [0, 1].map(|micro_batch| RowShare { micro_batch, rows: 0..2 });
        assert_eq!(shares(&batches, 1), [whole.to_vec()]);
    }

    #[test]
    fn whole_micro_batches_are_dealt_out_by_tokens_and_as_many_to_each() {
        let batches = batches(&[&[9], &[1], &[8], &[2]]);
        let shares = shares(&batches, 2);
        assert_eq!(tokens(&shares, &batches), [10, 10]);
        assert!(shares.iter().all(|parts| parts.len() == 2), "{shares:?}");
    }

    #[test]
    fn every_row_is_in_one_part_however_many_ranks_there_are() {
        let many: &[&[usize]] = &[&[5, 7, 1, 30, 2, 2, 9, 4], &[3, 3, 3, 3, 3, 3, 3, 0], &[1, 0, 0, 0, 0, 0, 0, 0]];
        for num_micro_batches in 0..=many.len() {
            let batches = batches(&many[..num_micro_batches]);
            for num_ranks in 1..20 {
                let shares = shares(&batches, num_ranks);
                assert_eq!(shares.len(), num_ranks);
                let mut rows: Vec<_> = shares
                    .iter()
                    .flatten()
                    .flat_map(|part| part.rows.clone().map(move |row| (part.micro_batch, row)))
                    .filter(|(micro_batch, row)| batches[*micro_batch].row_lengths[*row] > 0)
                    .collect();
                rows.sort_unstable();
                let all = batches.iter().enumerate().flat_map(|(micro_batch, batch)| {
                    let rows = batch.row_lengths.iter().enumerate().filter(|(_, length)| **length > 0);
                    rows.map(move |(row, _)| (micro_batch, row))
                });
                assert_eq!(rows, all.collect::<Vec<_>>(), "{num_micro_batches} on {num_ranks}");
            }
        }
    }

    #[test]
    fn a_micro_batch_alone_is_cut_between_rows_into_parts_of_about_as_many_tokens() {
        let even = batches(&[&[10; 8]]);
        assert_eq!(tokens(&shares(&even, 4), &even), [20; 4]);
        let odd = batches(&[&[40, 10, 10, 10, 10]]);
        let mut found = tokens(&shares(&odd, 2), &odd);
        found.sort_unstable();
        assert_eq!(found, [40, 40]);
        // No rank goes without as long as there are rows.
        let few = batches(&[&[100, 1, 1, 1]]);
        assert!(tokens(&shares(&few, 4), &few).iter().all(|tokens| *tokens > 0));
        let fewer = batches(&[&[100, 1]]);
        assert_eq!(tokens(&shares(&fewer, 4), &fewer).iter().filter(|tokens| **tokens == 0).count(), 2);
    }
}
