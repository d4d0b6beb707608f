//! Prompt lookup (Saxena, 2023): where the last tokens of a text stood in it before, those that followed there are a guess of the
//! next ones.
//!
//! A pass computes the guess together with the next token. Guessed tokens are kept as long as they are the ones that are drawn, so
//! the text is the same, in fewer passes.

use crate::images::is_of_image;

/// Last tokens that must be the same.
const EQUAL: usize = 3;

/// At most `most` tokens that may follow `next`, the token behind those `seen`: what followed the last place where the same tokens
/// stood.
pub(super) fn guess(seen: &[u32], next: u32, most: usize) -> &[u32] {
    let Some(start) = (seen.len() + 1).checked_sub(EQUAL) else { return &[] };
    let last = &seen[start..];
    let is_same = |end: &usize| seen[end - 1] == next && seen[..end - 1].ends_with(last);
    let Some(end) = (EQUAL..seen.len()).rev().find(is_same) else { return &[] };
    let follows = &seen[end..seen.len().min(end + most)];
    &follows[..follows.iter().position(|id| is_of_image(*id)).unwrap_or(follows.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guess_is_what_followed_the_same_tokens_last() {
        let seen = [1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2];
        assert_eq!(guess(&seen, 3, 2), [5, 6]);
        assert_eq!(guess(&seen, 3, 9), [5, 6, 1, 2]);
        assert_eq!(guess(&seen, 4, 9), [] as [u32; 0]);
        for few in 0..3 {
            assert_eq!(guess(&seen[..few], 1, 9), [] as [u32; 0], "{few}");
        }
        // Nothing is known of what follows the end.
        assert_eq!(guess(&[7, 7, 7], 7, 4), [] as [u32; 0]);
        assert_eq!(guess(&[7, 7, 7, 7], 7, 4), [7]);
    }
}
