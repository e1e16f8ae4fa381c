//! The text of a rule, in the words of nftables.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;
use std::str::SplitWhitespace;

use crate::packet::{ICMP, ICMPV6, TCP, UDP, kind};
use crate::rule::{Prefix, RULE_BYTES_MAX, Rule, state, way};

/// The words of a rule that have been read, and the rule that they make.
struct Reader<'a> {
    words: SplitWhitespace<'a>,
    rule: Rule,
    /// `ip` or `ip6` was the last family that was named.
    family: Option<u8>,
    /// A family of frames was chosen.
    has_kind: bool,
}

/// Reads a rule.
pub(crate) fn rule(text: &str) -> Result<Rule, String> {
    if text.len() > RULE_BYTES_MAX {
        return Err(format!("a rule has {RULE_BYTES_MAX} bytes at most"));
    }
    let words = text.split_whitespace();
    let mut reader = Reader { words, rule: Rule::ANY, family: None, has_kind: false };
    reader.read()?;
    Ok(reader.rule)
}

impl<'a> Reader<'a> {
    fn read(&mut self) -> Result<(), String> {
        while let Some(word) = self.words.next() {
            match word {
                "from" => self.way(way::FROM)?,
                "to" => self.way(way::TO)?,
                "arp" => self.kind(kind::ARP)?,
                "nd" => self.kind(kind::DISCOVERY)?,
                "ip" => self.family(kind::IPV4)?,
                "ip6" => self.family(kind::IPV6)?,
                "saddr" => self.rule.source = self.prefix(word)?,
                "daddr" => self.rule.target = self.prefix(word)?,
                "tcp" => self.protocol(TCP)?,
                "udp" => self.protocol(UDP)?,
                "icmp" => self.icmp(ICMP, kind::IPV4)?,
                "icmpv6" => self.icmp(ICMPV6, kind::IPV6)?,
                "proto" => self.numbered_protocol()?,
                "sport" => self.rule.source_ports = self.ports(word)?,
                "dport" => self.rule.target_ports = self.ports(word)?,
                "type" => self.icmp_type()?,
                "ether" => self.ether_type()?,
                "ct" => self.states()?,
                "accept" | "drop" => {
                    self.rule.accepts = word == "accept";
                    return match self.words.next() {
                        None => Ok(()),
                        Some(word) => Err(format!("`{word}` behind the verdict")),
                    };
                }
                _ => {
                    return Err(format!(
                        "`{word}` is no word of a rule; write for instance `to tcp dport 22 ct \
                         state new accept`"
                    ));
                }
            }
        }
        Err("no verdict: end it with `accept` or `drop`".to_owned())
    }

    fn next(&mut self, before: &str) -> Result<&'a str, String> {
        self.words.next().ok_or_else(|| format!("nothing behind `{before}`"))
    }

    fn way(&mut self, ways: u8) -> Result<(), String> {
        if self.rule.ways != way::ALL {
            return Err("two ways: leave both out for both".to_owned());
        }
        self.rule.ways = ways;
        Ok(())
    }

    /// Chooses a family of frames that is not IP.
    fn kind(&mut self, kinds: u8) -> Result<(), String> {
        if self.has_kind || self.rule.protocol.is_some() {
            return Err("two families of frames: write two rules".to_owned());
        }
        (self.rule.kinds, self.has_kind) = (kinds, true);
        Ok(())
    }

    /// Chooses a family of IP.
    fn family(&mut self, family: u8) -> Result<(), String> {
        self.rule.kinds &= family;
        if self.rule.kinds == 0 {
            return Err("two families of frames: write two rules".to_owned());
        }
        (self.family, self.has_kind) = (Some(family), true);
        Ok(())
    }

    fn prefix(&mut self, word: &str) -> Result<Prefix, String> {
        let family = self.family.ok_or_else(|| format!("`ip` or `ip6` before `{word}`"))?;
        let text = self.next(word)?;
        let wrong = || {
            format!("`{text}` is no address; write for instance `10.0.0.0/8` or `2001:db8::/32`")
        };
        let (address, len) = match text.split_once('/') {
            Some((address, len)) => (address, Some(len.parse::<u32>().map_err(|_| wrong())?)),
            None => (text, None),
        };
        let (bits, most) = if family == kind::IPV4 {
            let address: Ipv4Addr = address.parse().map_err(|_| wrong())?;
            (u128::from(u32::from(address)), 32)
        } else {
            let address: Ipv6Addr = address.parse().map_err(|_| wrong())?;
            (u128::from(address), 128)
        };
        let len = len.unwrap_or(most);
        let rest = most.checked_sub(len).ok_or_else(wrong)?;
        // IPv4 addresses have zeros in front of them.
        let mask = u128::MAX.checked_shl(rest).unwrap_or(0);
        Ok(Prefix { bits: bits & mask, mask: if len == 0 { 0 } else { mask } })
    }

    fn protocol(&mut self, protocol: u8) -> Result<(), String> {
        let is_ip = self.rule.kinds & (kind::IPV4 | kind::IPV6) != 0;
        let is_first = self.rule.protocol.is_none_or(|other| other == protocol);
        if !is_ip || !is_first {
            return Err("two protocols: write two rules".to_owned());
        }
        self.rule.protocol = Some(protocol);
        Ok(())
    }

    fn icmp(&mut self, protocol: u8, family: u8) -> Result<(), String> {
        self.family(family)?;
        self.protocol(protocol)
    }

    fn numbered_protocol(&mut self) -> Result<(), String> {
        let text = self.next("proto")?;
        let number = text.parse::<u8>();
        let number = number.map_err(|_| format!("`{text}` is no protocol: write 0 to 255"))?;
        self.protocol(number)
    }

    fn ports(&mut self, word: &str) -> Result<RangeInclusive<u16>, String> {
        if !matches!(self.rule.protocol, Some(TCP | UDP)) {
            return Err(format!("`tcp` or `udp` before `{word}`"));
        }
        self.rule.needs_ports = true;
        let text = self.next(word)?;
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (first.parse::<u16>(), last.parse::<u16>()) {
            (Ok(first), Ok(last)) if first <= last => Ok(first..=last),
            _ => Err(format!("`{text}` are no ports; write for instance `22` or `1024-65535`")),
        }
    }

    fn icmp_type(&mut self) -> Result<(), String> {
        let is_v6 = match self.rule.protocol {
            Some(ICMP) => false,
            Some(ICMPV6) => true,
            _ => return Err("`icmp` or `icmpv6` before `type`".to_owned()),
        };
        let text = self.next("type")?;
        let number = match text {
            "echo-request" => Some(if is_v6 { 128 } else { 8 }),
            "echo-reply" => Some(if is_v6 { 129 } else { 0 }),
            _ => text.parse::<u8>().ok(),
        };
        let number = number.ok_or_else(|| {
            format!("`{text}` is no type: write `echo-request`, `echo-reply` or 0 to 255")
        })?;
        if is_v6 && matches!(number, 133..=137) {
            return Err("neighbour discovery is `nd`".to_owned());
        }
        self.rule.icmp_type = Some(number);
        Ok(())
    }

    fn ether_type(&mut self) -> Result<(), String> {
        if self.next("ether")? != "type" {
            return Err("`ether` goes with `type`, as in `ether type 0x88cc`".to_owned());
        }
        let text = self.next("type")?;
        let number = text.strip_prefix("0x").and_then(|hex| u16::from_str_radix(hex, 16).ok());
        let number = number.ok_or_else(|| format!("`{text}`: write for instance `0x88cc`"))?;
        let word = match number {
            0x0800 => Some("ip"),
            0x0806 => Some("arp"),
            0x86dd => Some("ip6"),
            _ => None,
        };
        if let Some(word) = word {
            return Err(format!("this type is `{word}`"));
        }
        self.kind(kind::OTHER)?;
        self.rule.ether_type = Some(number);
        Ok(())
    }

    fn states(&mut self) -> Result<(), String> {
        if self.next("ct")? != "state" {
            return Err("`ct` goes with `state`, as in `ct state new`".to_owned());
        }
        let mut states = 0;
        for text in self.next("state")?.split(',') {
            states |= match text {
                "new" => state::NEW,
                "established" => state::ESTABLISHED,
                "related" => state::RELATED,
                "invalid" => state::INVALID,
                "untracked" => state::UNTRACKED,
                _ => {
                    return Err(format!(
                        "`{text}` is no state; there are new, established, related, invalid and \
                         untracked"
                    ));
                }
            };
        }
        self.rule.states = states;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read_word_by_word() {
        let any = Rule::ANY;
        assert_eq!(rule("accept").unwrap(), any);
        assert_eq!(rule(" drop ").unwrap(), Rule { accepts: false, ..any.clone() });
        let ssh = rule("to tcp dport 22 ct state new,related accept").unwrap();
        assert_eq!(
            ssh,
            Rule {
                ways: way::TO,
                protocol: Some(TCP),
                needs_ports: true,
                target_ports: 22..=22,
                states: state::NEW | state::RELATED,
                ..any.clone()
            }
        );
        let net = rule("from ip saddr 10.1.2.3/8 daddr 192.168.0.7 udp sport 1-9 drop").unwrap();
        assert_eq!(net.source, Prefix { bits: 10 << 24, mask: u128::MAX << 24 });
        assert_eq!(net.target, Prefix { bits: 0xc0a8_0007, mask: u128::MAX });
        assert_eq!((net.kinds, net.source_ports), (kind::IPV4, 1..=9));
        let all = rule("ip6 saddr ::/0 icmpv6 type echo-request accept").unwrap();
        assert_eq!((all.source, all.icmp_type), (Prefix::ANY, Some(128)));
        assert_eq!(rule("ip saddr 0.0.0.0/0 drop").unwrap().source, Prefix::ANY);
        assert_eq!(rule("ether type 0x88CC drop").unwrap().ether_type, Some(0x88cc));
        assert_eq!(rule("arp drop").unwrap().kinds, kind::ARP);
        assert_eq!(rule("proto 47 accept").unwrap().protocol, Some(47));
    }

    #[test]
    fn rules_that_make_no_sense_are_refused_with_the_remedy() {
        for (text, why) in [
            ("", "no verdict"),
            ("tcp", "no verdict"),
            ("accept drop", "behind the verdict"),
            ("reject", "no word of a rule"),
            ("from to drop", "two ways"),
            ("tcp udp drop", "two protocols"),
            ("arp tcp drop", "two protocols"),
            ("tcp arp drop", "two families"),
            ("ip ip6 drop", "two families"),
            ("ip icmpv6 drop", "two families"),
            ("saddr 10.0.0.1 drop", "`ip` or `ip6` before"),
            ("ip saddr", "nothing behind"),
            ("ip saddr 10.0.0.1/33 drop", "no address"),
            ("ip saddr ::1 drop", "no address"),
            ("ip6 saddr ::1/129 drop", "no address"),
            ("dport 22 drop", "`tcp` or `udp` before"),
            ("tcp dport 9-1 drop", "no ports"),
            ("tcp dport 65536 drop", "no ports"),
            ("type 8 drop", "`icmp` or `icmpv6` before"),
            ("icmp type ping drop", "no type"),
            ("icmpv6 type 135 drop", "`nd`"),
            ("ether type 0x0800 drop", "`ip`"),
            ("ether type 2048 drop", "0x88cc"),
            ("ether vlan 1 drop", "goes with `type`"),
            ("ct mark 1 drop", "goes with `state`"),
            ("ct state old drop", "no state"),
            ("proto 256 drop", "0 to 255"),
        ] {
            let error = rule(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(rule(&"a".repeat(300)).unwrap_err().contains("256 bytes"));
    }
}
