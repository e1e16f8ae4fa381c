//! A reader of the files that this crate writes, for tests and fuzzing. It is strict: anything that
//! the writer would not write is an error, with its place.

use super::{
    BYTE_ORDER, COMMENT, Direction, END, INTERFACE, INTERFACE_NAME, INTERFACE_RESOLUTION,
    LINKTYPE_ETHERNET, PACKET, PACKET_DROPS, PACKET_FLAGS, RESOLUTION, SECTION,
    SECTION_APPLICATION, STATISTICS, STATISTICS_DROPPED, STATISTICS_RECEIVED,
};

/// A file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct File {
    /// The program that has written it.
    pub application: String,
    /// The name of its interface.
    pub interface: String,
    /// The most bytes of a packet.
    pub snaplen: u32,
    /// Its packets.
    pub packets: Vec<ReadPacket>,
    /// The time at its end, the packets that there were, and those of them that are missing.
    pub end: Option<(u64, u64, u64)>,
}

/// A packet of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadPacket {
    /// Nanoseconds since 1970.
    pub at_ns: u64,
    /// Its way.
    pub direction: Direction,
    /// Its size on the wire in bytes.
    pub len_bytes: u32,
    /// Its first bytes.
    pub bytes: Vec<u8>,
    /// Packets between the one before and this one that are missing in the file.
    pub lost: u64,
    /// The text for people.
    pub comment: Option<String>,
}

/// A file is not as the writer writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// The offset of the block.
    pub at: usize,
    /// The mistake.
    pub why: &'static str,
}

type Parsed<T> = Result<T, &'static str>;

/// The rest of a block, or of a file.
#[derive(Clone, Copy)]
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> Parsed<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or("it ends too early")?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Parsed<[u8; N]> {
        self.take(N)?.first_chunk().copied().ok_or("it ends too early")
    }

    fn half(&mut self) -> Parsed<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn word(&mut self) -> Parsed<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn time(&mut self) -> Parsed<u64> {
        Ok(u64::from(self.word()?) << 32 | u64::from(self.word()?))
    }

    /// So many bytes, and zeros up to a multiple of 4.
    fn padded(&mut self, count: usize) -> Parsed<&'a [u8]> {
        let taken = self.take(count)?;
        let pad = self.take(count.next_multiple_of(4).saturating_sub(count))?;
        if pad.iter().all(|byte| *byte == 0) { Ok(taken) } else { Err("its padding is not zero") }
    }

    /// The next option, or `None` behind the last one, which ends the block.
    fn option(&mut self) -> Parsed<Option<(u16, &'a [u8])>> {
        let (code, len_bytes) = (self.half()?, self.half()?);
        let value = self.padded(len_bytes.into())?;
        if code != END {
            return Ok(Some((code, value)));
        }
        let is_end = value.is_empty() && self.0.is_empty();
        if is_end { Ok(None) } else { Err("bytes behind its options") }
    }

    fn be(self, expected: &[u8]) -> Parsed<()> {
        if self.0 == expected { Ok(()) } else { Err("a value that the writer does not write") }
    }
}

fn number(value: &[u8]) -> Parsed<u64> {
    let value: Result<[u8; 8], _> = value.try_into();
    value.map(u64::from_le_bytes).map_err(|_| "a number that has not 8 bytes")
}

fn text(value: &[u8]) -> Parsed<String> {
    String::from_utf8(value.to_vec()).map_err(|_| "a text that is not UTF-8")
}

/// Reads a file, which may end behind any of its blocks.
///
/// # Errors
/// The file is not as the writer writes it.
pub fn read(bytes: &[u8]) -> Result<File, Malformed> {
    let mut file = File::default();
    let mut rest = Rest(bytes);
    for number in 0_usize.. {
        if rest.0.is_empty() {
            break;
        }
        let at = bytes.len().saturating_sub(rest.0.len());
        let read = block(&mut rest).and_then(|(kind, body)| file.block(number, kind, body));
        read.map_err(|why| Malformed { at, why })?;
    }
    Ok(file)
}

/// Takes a block: its type and its body.
fn block<'a>(rest: &mut Rest<'a>) -> Parsed<(u32, Rest<'a>)> {
    let (kind, len_bytes) = (rest.word()?, rest.word()?);
    if !len_bytes.is_multiple_of(4) {
        return Err("its length is no multiple of 4");
    }
    let body_bytes = len_bytes.checked_sub(12).ok_or("its length is too small")?;
    let body = rest.take(usize::try_from(body_bytes).map_err(|_| "it is too long")?)?;
    if rest.word()? != len_bytes {
        return Err("its lengths differ");
    }
    Ok((kind, Rest(body)))
}

impl File {
    fn block(&mut self, number: usize, kind: u32, body: Rest<'_>) -> Parsed<()> {
        match (number, kind) {
            (0, SECTION) => self.section(body),
            (1, INTERFACE) => self.interface(body),
            (2.., PACKET) if self.end.is_none() => self.packet(body),
            (2.., STATISTICS) if self.end.is_none() => self.statistics(body),
            _ => Err("a block that does not belong here"),
        }
    }

    fn section(&mut self, mut body: Rest<'_>) -> Parsed<()> {
        Rest(body.take(16)?).be(&[
            BYTE_ORDER.to_le_bytes().as_slice(),
            &[1, 0, 0, 0],
            &u64::MAX.to_le_bytes(),
        ]
        .concat())?;
        while let Some((code, value)) = body.option()? {
            match code {
                SECTION_APPLICATION => self.application = text(value)?,
                _ => return Err("an option of sections that the writer does not write"),
            }
        }
        Ok(())
    }

    fn interface(&mut self, mut body: Rest<'_>) -> Parsed<()> {
        Rest(body.take(4)?).be(&u32::from(LINKTYPE_ETHERNET).to_le_bytes())?;
        self.snaplen = body.word()?;
        while let Some((code, value)) = body.option()? {
            match code {
                INTERFACE_NAME => self.interface = text(value)?,
                INTERFACE_RESOLUTION => Rest(value).be(&[RESOLUTION])?,
                _ => return Err("an option of interfaces that the writer does not write"),
            }
        }
        Ok(())
    }

    fn packet(&mut self, mut body: Rest<'_>) -> Parsed<()> {
        Rest(body.take(4)?).be(&[0; 4])?;
        let at_ns = body.time()?;
        let (kept_bytes, len_bytes) = (body.word()?, body.word()?);
        let kept_bytes = usize::try_from(kept_bytes).map_err(|_| "it is too long")?;
        let bytes = body.padded(kept_bytes)?.to_vec();
        let (mut direction, mut lost, mut comment) = (None, 0, None);
        while let Some((code, value)) = body.option()? {
            match (code, value) {
                (PACKET_FLAGS, [1, 0, 0, 0]) => direction = Some(Direction::Inbound),
                (PACKET_FLAGS, [2, 0, 0, 0]) => direction = Some(Direction::Outbound),
                (PACKET_DROPS, value) => lost = number(value)?,
                (COMMENT, value) => comment = Some(text(value)?),
                _ => return Err("an option of packets that the writer does not write"),
            }
        }
        let direction = direction.ok_or("a packet without a direction")?;
        self.packets.push(ReadPacket { at_ns, direction, len_bytes, bytes, lost, comment });
        Ok(())
    }

    fn statistics(&mut self, mut body: Rest<'_>) -> Parsed<()> {
        Rest(body.take(4)?).be(&[0; 4])?;
        let at_ns = body.time()?;
        let (mut received, mut lost) = (0, 0);
        while let Some((code, value)) = body.option()? {
            match code {
                STATISTICS_RECEIVED => received = number(value)?,
                STATISTICS_DROPPED => lost = number(value)?,
                _ => return Err("an option of statistics that the writer does not write"),
            }
        }
        self.end = Some((at_ns, received, lost));
        Ok(())
    }

    /// Writes the file.
    pub fn write(&self, out: &mut Vec<u8>) {
        super::start(out, &self.application, &self.interface, self.snaplen);
        for packet in &self.packets {
            let ReadPacket { at_ns, direction, len_bytes, bytes, lost, comment } = packet;
            super::packet(
                out,
                &super::Packet {
                    at_ns: *at_ns,
                    direction: *direction,
                    len_bytes: *len_bytes,
                    bytes,
                    lost: *lost,
                    comment: comment.as_deref(),
                },
            );
        }
        if let Some((at_ns, received, lost)) = self.end {
            super::statistics(out, at_ns, received, lost);
        }
    }
}
