//! Guesses the correct spelling of a misspelt word.

use strsim::levenshtein;

/// Returns the candidate nearest to `word`, if its distance is one or two edits.
pub(super) fn nearest<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // A long word is no misspelling, and the comparison takes quadratic time.
    if word.chars().count() > 64 {
        return None;
    }
    let near = |candidate: &&str| {
        levenshtein(word, candidate) <= 2.min(candidate.chars().count().div_euclid(2))
    };
    candidates.into_iter().filter(near).min_by_key(|candidate| levenshtein(word, candidate))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_near_word_is_suggested() {
        let words = ["queues", "queue_size_max", "store", "cpu"];
        assert_eq!(nearest("queue", words), Some("queues"));
        assert_eq!(nearest("stroe", words), Some("store"));
        assert_eq!(nearest("banana", words), None);
        assert_eq!(nearest("x", words), None);
        assert_eq!(nearest(&"q".repeat(1_000_000), words), None);
    }
}
