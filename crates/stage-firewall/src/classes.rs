//! Which rules a packet can match, by each of its facts: sets of rules, whose intersection leaves
//! few to be compared.

use std::ops::RangeInclusive;

use crate::packet::Packet;
use crate::rule::{Rule, Rules};

/// Rules of a word of a set.
const WORD: usize = u64::BITS as usize;
/// The numbers of ways, of kinds and of states, each of which is a bit.
const WAYS: usize = 2;
const KINDS: usize = 5;
const STATES: usize = 5;

/// The sets of the rules of one port. A field has at most twice as many ranges as there are rules,
/// and one more.
pub(crate) struct Classes {
    /// The words of a set.
    words: usize,
    /// The set of all rules.
    all: Box<[u64]>,
    /// The sets by way, kind and state.
    sorts: Box<[u64]>,
    protocols: Field<u8>,
    source_ports: Field<u16>,
    target_ports: Field<u16>,
    sources: Field<u128>,
    targets: Field<u128>,
}

impl Classes {
    pub fn new(rules: &Rules) -> Self {
        let rules = rules.rules();
        let words = rules.len().div_ceil(WORD);
        let mut sorts = Vec::new();
        for state in 0..STATES {
            for kind in 0..KINDS {
                for way in 0..WAYS {
                    let has = |set: u8, bit: usize| usize::from(set).wrapping_shr(bit as u32) & 1;
                    sorts.extend(set(words, rules, |rule| {
                        let both = has(rule.ways, way) & has(rule.kinds, kind);
                        both & has(rule.states, state) != 0
                    }));
                }
            }
        }
        let ports = |rule: &Rule, ports: &RangeInclusive<u16>| {
            rule.needs_ports.then(|| (*ports.start(), *ports.end()))
        };
        let field = (words, rules);
        Self {
            words,
            all: set(words, rules, |_| true),
            sorts: sorts.into(),
            protocols: Field::new(field, |rule| rule.protocol.map(|is| (is, is))),
            source_ports: Field::new(field, |rule| ports(rule, &rule.source_ports)),
            target_ports: Field::new(field, |rule| ports(rule, &rule.target_ports)),
            sources: Field::new(field, |rule| rule.source.range()),
            targets: Field::new(field, |rule| rule.target.range()),
        }
    }

    /// The first of the rules that matches, and whether it accepts: as a search through
    /// all of them would find.
    #[inline]
    pub fn find(&self, rules: &Rules, packet: &Packet, way: u8, state: u8) -> Option<(u16, bool)> {
        let (way_at, kind_at) = (way.trailing_zeros(), packet.kind.trailing_zeros());
        let sort = (state.trailing_zeros() as usize).wrapping_mul(KINDS);
        let sort = sort.wrapping_add(kind_at as usize).wrapping_mul(WAYS);
        let sort = sort.wrapping_add(way_at as usize).wrapping_mul(self.words);
        let sorts = self.sorts.get(sort..sort.wrapping_add(self.words))?;
        let ports = self.source_ports.set(packet.source_port, self.words, &self.all);
        let to_ports = self.target_ports.set(packet.target_port, self.words, &self.all);
        let sources = self.sources.set(packet.source, self.words, &self.all);
        let targets = self.targets.set(packet.target, self.words, &self.all);
        let protocols = self.protocols.set(packet.protocol, self.words, &self.all);
        let sets = sorts.iter().zip(protocols).zip(ports.iter().zip(to_ports));
        let sets = sets.zip(sources.iter().zip(targets)).enumerate();
        for (word, (((sort, protocol), (port, to_port)), (source, target))) in sets {
            let mut left = sort & protocol & port & to_port & source & target;
            while left != 0 {
                let bit = left.trailing_zeros() as usize;
                let at = word.wrapping_mul(WORD).wrapping_add(bit);
                if rules.matches(at, packet, way, state) {
                    return Some((at as u16, rules.accepts(at)));
                }
                left &= left.wrapping_sub(1);
            }
        }
        None
    }
}

/// The set of the rules that have a property.
fn set(words: usize, rules: &[Rule], has: impl Fn(&Rule) -> bool) -> Box<[u64]> {
    let mut set = vec![0; words];
    for (at, _) in rules.iter().enumerate().filter(|(_, rule)| has(rule)) {
        put(&mut set, at, true);
    }
    set.into()
}

/// Puts the rule at `at` into a set, or takes it out.
fn put(set: &mut [u64], at: usize, is_in: bool) {
    let bit = 1_u64.wrapping_shl((at % WORD) as u32);
    if let Some(word) = set.get_mut(at / WORD) {
        *word = if is_in { *word | bit } else { *word & !bit };
    }
}

/// A field of packets: ranges of its values, in each of which all values are in the same rules'
/// ranges.
struct Field<T> {
    /// Where the ranges begin; empty if no rule asks for the field.
    starts: Box<[T]>,
    /// The sets of the ranges.
    sets: Box<[u64]>,
}

/// A value of a field.
trait Value: Copy + Ord + Default {
    /// The next one.
    fn next(self) -> Option<Self>;
}

impl Value for u8 {
    fn next(self) -> Option<Self> {
        self.checked_add(1)
    }
}

impl Value for u16 {
    fn next(self) -> Option<Self> {
        self.checked_add(1)
    }
}

impl Value for u128 {
    fn next(self) -> Option<Self> {
        self.checked_add(1)
    }
}

impl<T: Value> Field<T> {
    /// The sets of rules by a field, whose first and last value in a rule is `range`; `None` is for
    /// all values.
    fn new((words, rules): (usize, &[Rule]), range: impl Fn(&Rule) -> Option<(T, T)>) -> Self {
        let mut now = set(words, rules, |rule| range(rule).is_none());
        // From each of these values on, a rule is in the set or is not.
        let mut changes = Vec::new();
        for (at, rule) in rules.iter().enumerate() {
            if let Some((first, last)) = range(rule) {
                changes.push((first, at, true));
                changes.extend(last.next().map(|next| (next, at, false)));
            }
        }
        changes.sort_unstable();
        let (mut starts, mut sets) = (Vec::new(), Vec::new());
        if changes.first().is_some_and(|(start, ..)| *start > T::default()) {
            starts.push(T::default());
            sets.extend_from_slice(&now);
        }
        for same in changes.chunk_by(|one, other| one.0 == other.0) {
            same.iter().for_each(|(_, at, is_in)| put(&mut now, *at, *is_in));
            starts.extend(same.first().map(|(start, ..)| *start));
            sets.extend_from_slice(&now);
        }
        Self { starts: starts.into(), sets: sets.into() }
    }

    /// The set of this value: `all` if no rule asks for the field.
    #[inline]
    fn set<'a>(&'a self, value: T, words: usize, all: &'a [u64]) -> &'a [u64] {
        // The first range begins with the least value.
        let range = self.starts.partition_point(|start| *start <= value).wrapping_sub(1);
        let at = range.wrapping_mul(words);
        self.sets.get(at..at.wrapping_add(words)).unwrap_or(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{Fragment, Message, kind};
    use crate::rule::{Prefix, state, way};
    use crate::tests::Random;

    fn prefix(random: &mut Random) -> Prefix {
        let mask = random.of(&[0, u128::MAX, u128::MAX << 8, u128::MAX << 31, u128::MAX << 127]);
        Prefix { bits: address(random) & mask, mask }
    }

    fn address(random: &mut Random) -> u128 {
        random.of(&[0, 1, 255, 256, 0xffff_ffff, 1 << 127, u128::MAX, u128::MAX - 1])
    }

    fn ports(random: &mut Random) -> RangeInclusive<u16> {
        let (one, other) = (port(random), port(random));
        one.min(other)..=one.max(other)
    }

    fn port(random: &mut Random) -> u16 {
        random.of(&[0, 1, 2, 22, 80, 81, 1000, u16::MAX - 1, u16::MAX])
    }

    fn rule(random: &mut Random) -> Rule {
        let needs_ports = random.below(2) == 0;
        let any = 0..=u16::MAX;
        Rule {
            ways: random.of(&[way::ALL, way::FROM, way::TO]),
            kinds: random.of(&[kind::IPV4 | kind::IPV6, kind::IPV4, kind::ARP, kind::OTHER]),
            states: random.of(&[state::ALL, state::NEW, state::ESTABLISHED | state::RELATED]),
            accepts: random.below(2) == 0,
            ether_type: random.of(&[None, None, Some(0x88cc)]),
            protocol: random.of(&[None, Some(0), Some(6), Some(255)]),
            icmp_type: random.of(&[None, None, Some(8)]),
            needs_ports,
            source_ports: if needs_ports { ports(random) } else { any.clone() },
            target_ports: if needs_ports { ports(random) } else { any },
            source: prefix(random),
            target: prefix(random),
        }
    }

    fn packet(random: &mut Random) -> Packet {
        Packet {
            kind: random.of(&[kind::IPV4, kind::IPV6, kind::ARP, kind::DISCOVERY, kind::OTHER]),
            ether_type: random.of(&[0x0800, 0x88cc]),
            protocol: random.of(&[0, 1, 6, 17, 254, 255]),
            source: address(random),
            target: address(random),
            source_port: port(random),
            target_port: port(random),
            has_ports: random.below(3) > 0,
            tcp_flags: 0,
            icmp_type: random.of(&[None, Some(0), Some(8)]),
            message: Message::None,
            fragment: Fragment::Whole,
        }
    }

    #[test]
    fn the_first_rule_that_matches_is_found() {
        let mut random = Random(3);
        let mut found = 0;
        for count in [0, 1, 2, 5, 63, 64, 65, 200, 1024] {
            for _ in 0..6 {
                let all: Vec<Rule> = (0..count).map(|_| rule(&mut random)).collect();
                let rules = Rules::of(all.clone());
                let classes = Classes::new(&rules);
                for _ in 0..300 {
                    let packet = packet(&mut random);
                    let way = random.of(&[way::FROM, way::TO]);
                    let state = 1 << random.below(STATES);
                    let mut each = all.iter();
                    let first = each.position(|rule| rule.matches(&packet, way, state));
                    let first = first.map(|at| (at as u16, all[at].accepts));
                    assert_eq!(classes.find(&rules, &packet, way, state), first, "{packet:?}");
                    found += usize::from(first.is_some_and(|(at, _)| at > 0));
                }
            }
        }
        assert!(found > 2_000, "{found}");
    }
}
