//! Guesses what a misspelt word was meant to be.

/// The candidate that is one or two slips away from `word`, if any is; the nearest one.
pub(super) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // A long word is a wrong word, and comparing is quadratic.
    if word.chars().count() > 64 {
        return None;
    }
    let near = |candidate: &&str| distance(word, candidate) <= 2.min(candidate.chars().count().div_euclid(2));
    candidates.into_iter().filter(near).min_by_key(|candidate| distance(word, candidate))
}

/// How many characters have to be added, left out or replaced (Levenshtein's distance).
fn distance(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.chars().count()).collect();
    for (index, from_char) in from.chars().enumerate() {
        let mut diagonal = index;
        let mut left = index.saturating_add(1);
        let mut next = vec![left];
        for (to_char, above) in to.chars().zip(row.iter().skip(1)) {
            let replaced = diagonal.saturating_add(usize::from(from_char != to_char));
            diagonal = *above;
            left = replaced.min(above.saturating_add(1)).min(left.saturating_add(1));
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_counted() {
        for (from, to, slips) in [
            ("", "", 0),
            ("abc", "abc", 0),
            ("queue", "queues", 1),
            ("sidcore", "sidecore", 1),
            ("", "ab", 2),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(from, to), slips, "{from} {to}");
            assert_eq!(distance(to, from), slips, "{to} {from}");
        }
    }

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
