//! Rules, and the first one that matches a packet.

use std::ops::RangeInclusive;

use crate::packet::{Packet, kind};

/// The most rules of a port.
pub const RULES_MAX: usize = 1024;
/// The longest rule, in bytes.
pub const RULE_BYTES_MAX: usize = 256;

/// States of a packet, as a set.
pub(crate) mod state {
    pub(crate) const NEW: u8 = 1;
    pub(crate) const ESTABLISHED: u8 = 2;
    pub(crate) const RELATED: u8 = 4;
    pub(crate) const INVALID: u8 = 8;
    pub(crate) const UNTRACKED: u8 = 16;
    pub(crate) const ALL: u8 = 31;
}

/// Ways of a packet, as a set.
pub(crate) mod way {
    pub(crate) const FROM: u8 = 1;
    pub(crate) const TO: u8 = 2;
    pub(crate) const ALL: u8 = 3;
}

/// A rule that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct RuleError {
    /// The number of the rule, counted from 0; that of the first superfluous one if there are too
    /// many.
    pub index: usize,
    /// The sentence for the operator.
    pub why: String,
}

/// One rule. A packet matches if it is in all sets and ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    pub ways: u8,
    pub kinds: u8,
    pub states: u8,
    pub accepts: bool,
    pub ether_type: Option<u16>,
    pub protocol: Option<u8>,
    pub icmp_type: Option<u8>,
    /// Whether packets without ports never match.
    pub needs_ports: bool,
    pub source_ports: RangeInclusive<u16>,
    pub target_ports: RangeInclusive<u16>,
    pub source: Prefix,
    pub target: Prefix,
}

/// Addresses with the same leading bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub bits: u128,
    pub mask: u128,
}

impl Prefix {
    pub const ANY: Self = Self { bits: 0, mask: 0 };

    /// The first and the last of the addresses; `None` if they are all addresses.
    pub fn range(&self) -> Option<(u128, u128)> {
        (self.mask != 0).then_some((self.bits, self.bits | !self.mask))
    }

    #[inline]
    fn has(&self, address: u128) -> bool {
        (address ^ self.bits) & self.mask == 0
    }
}

impl Rule {
    /// A rule for all IP packets but neighbour discovery.
    pub const ANY: Self = Self {
        ways: way::ALL,
        kinds: kind::IPV4 | kind::IPV6,
        states: state::ALL,
        accepts: true,
        ether_type: None,
        protocol: None,
        icmp_type: None,
        needs_ports: false,
        source_ports: 0..=u16::MAX,
        target_ports: 0..=u16::MAX,
        source: Prefix::ANY,
        target: Prefix::ANY,
    };

    #[inline]
    pub fn matches(&self, packet: &Packet, way: u8, state: u8) -> bool {
        self.ways & way != 0
            && self.kinds & packet.kind != 0
            && self.states & state != 0
            && self.protocol.is_none_or(|protocol| protocol == packet.protocol)
            && (!self.needs_ports
                || packet.has_ports
                    && self.source_ports.contains(&packet.source_port)
                    && self.target_ports.contains(&packet.target_port))
            && self.icmp_type.is_none_or(|icmp_type| Some(icmp_type) == packet.icmp_type)
            && self.source.has(packet.source)
            && self.target.has(packet.target)
            && self.ether_type.is_none_or(|ether_type| ether_type == packet.ether_type)
    }
}

/// The rules of a port, in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    rules: Vec<Rule>,
    texts: Vec<String>,
}

impl Rules {
    /// Reads rules, one in each text.
    ///
    /// # Errors
    /// A rule is not understood, or there are too many.
    pub fn parse<T: AsRef<str>>(texts: &[T]) -> Result<Self, RuleError> {
        if texts.len() > RULES_MAX {
            let (index, count) = (RULES_MAX, texts.len());
            let why = format!("{count} rules: a port has {RULES_MAX} at most");
            return Err(RuleError { index, why });
        }
        let mut all = Self::default();
        for (index, text) in texts.iter().enumerate() {
            let text = text.as_ref();
            let rule = crate::parse::rule(text).map_err(|why| {
                let (number, text) = (index.saturating_add(1), short(text));
                RuleError { index, why: printable(&format!("rule {number}, \"{text}\": {why}")) }
            })?;
            all.rules.push(rule);
            all.texts.push(text.split_whitespace().collect::<Vec<_>>().join(" "));
        }
        Ok(all)
    }

    /// The rules as text, in their order.
    #[must_use]
    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Whether a rule asks for the state of a connection.
    #[must_use]
    pub fn tracks(&self) -> bool {
        self.rules.iter().any(|rule| rule.states != state::ALL)
    }

    #[cfg(test)]
    pub(crate) const fn of(rules: Vec<Rule>) -> Self {
        Self { rules, texts: Vec::new() }
    }

    pub(crate) fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Whether the rule at `at` matches.
    #[inline]
    pub(crate) fn matches(&self, at: usize, packet: &Packet, way: u8, state: u8) -> bool {
        self.rules.get(at).is_some_and(|rule| rule.matches(packet, way, state))
    }

    #[inline]
    pub(crate) fn accepts(&self, at: usize) -> bool {
        self.rules.get(at).is_none_or(|rule| rule.accepts)
    }
}

/// The beginning of a text that may be anything.
fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

/// A message that quotes such a text, for a terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}
