//! Several documents in one row.

use std::collections::BTreeMap;

/// Number of documents that are sorted by length before they are placed. A larger window leaves less room unused, a
/// smaller one keeps documents of all lengths in all rows.
const WINDOW_DOCUMENTS: usize = 1024;

/// Puts the documents of `order` into rows of at most `capacity` tokens, by best fit. Documents are taken in windows,
/// in the order given; the longest of a window first, each into the row with the least room that still fits it.
///
/// `lengths[document]` is at most `capacity`; a document with no tokens takes no room.
pub(super) fn best_fit(order: &[u32], lengths: &[u32], capacity: u32) -> Vec<Vec<u32>> {
    let length = |document: u32| lengths[document as usize];
    let mut rows: Vec<Vec<u32>> = Vec::new();
    let mut rows_by_room: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for window in order.chunks(WINDOW_DOCUMENTS) {
        let mut window = window.to_vec();
        // The sort is stable, so that equal lengths keep the order of the epoch.
        window.sort_by_key(|document| std::cmp::Reverse(length(*document)));
        for document in window {
            let tightest = rows_by_room.range_mut(length(document)..).next();
            let found = tightest.and_then(|(room, rows)| rows.pop().map(|row| (row, *room)));
            let (row, room) = found.unwrap_or_else(|| {
                rows.push(Vec::new());
                (rows.len() - 1, capacity)
            });
            if rows_by_room.get(&room).is_some_and(Vec::is_empty) {
                rows_by_room.remove(&room);
            }
            rows[row].push(document);
            rows_by_room.entry(room - length(document)).or_default().push(row);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::order::{Purpose, permutation};

    #[test]
    fn every_document_is_in_one_row_and_no_row_is_too_long() {
        let lengths: Vec<u32> = (0..5000).map(|i| i * 7919 % 300 + 1).collect();
        let order = permutation(5000, 1, 0, Purpose::Epoch);
        let rows = best_fit(&order, &lengths, 1024);
        let mut documents: Vec<u32> = rows.concat();
        documents.sort_unstable();
        assert_eq!(documents, (0..5000).collect::<Vec<_>>());
        let used = |row: &Vec<u32>| row.iter().map(|document| lengths[*document as usize]).sum::<u32>();
        assert!(rows.iter().all(|row| used(row) <= 1024));
        let fewest = lengths.iter().sum::<u32>().div_ceil(1024) as usize;
        assert!(rows.len() <= fewest + 3, "{} rows, {fewest} are the least", rows.len());
    }

    #[test]
    fn a_document_goes_where_the_least_room_is_left() {
        assert_eq!(best_fit(&[0, 1, 2, 3], &[6, 5, 4, 5], 10), [vec![0, 2], vec![1, 3]]);
        assert_eq!(best_fit(&[0, 1], &[0, 10], 10), [vec![1, 0]]);
        assert!(best_fit(&[], &[], 10).is_empty());
    }
}
