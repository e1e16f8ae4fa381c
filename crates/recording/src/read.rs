//! The reader.

use std::io::{self, Read};

use crate::check::checksum;
use crate::format::{DATA_MAX, FRAME_BYTES, HEADER_BYTES, Header, REQUEST_BYTES, Record};

/// The fault of a file.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The file does not begin as a recording.
    #[error("this is no recording of Sidecore")]
    NoRecording,
    /// The file is of another version.
    #[error(
        "the format has version {0}, and this program reads version 1: use the program of that \
         version"
    )]
    Version(u32),
    /// The file ends within a record, or without an end.
    #[error(
        "the recording is cut off: it is still being written, its daemon was killed, or the file \
         was copied in part"
    )]
    CutOff,
    /// A checksum is not that of its bytes.
    #[error("the bytes are damaged: their checksum differs")]
    Check,
    /// The length of a record is none that a record has.
    #[error("the length of a record is wrong")]
    Length,
    /// A field has a value that no writer of this version writes.
    #[error("the field \"{0}\" of a record has no valid value")]
    Value(&'static str),
    /// There are bytes behind the end.
    #[error("there are bytes behind the end of the recording")]
    Behind,
    /// The file cannot be read.
    #[error("the file cannot be read: {0}")]
    Io(#[from] io::Error),
}

/// A fault, and its place.
#[derive(Debug, thiserror::Error)]
#[error("at byte {at_bytes}: {fault}")]
pub struct RecordingError {
    /// The place in the file of the record or header at fault.
    pub at_bytes: u64,
    /// The fault.
    pub fault: Fault,
}

/// Reads a recording, a record at a time.
pub struct Reader<R> {
    input: R,
    header: Header,
    /// The place of the next record.
    at_bytes: u64,
    /// The next record's body.
    body: Vec<u8>,
    /// The data of the last record, as a part of `body`.
    data_at: usize,
    /// The last record was the end, or a fault.
    has_ended: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// The input is no recording that this version reads.
    pub fn new(mut input: R) -> Result<Self, RecordingError> {
        let wrong = |fault| RecordingError { at_bytes: 0, fault };
        let mut bytes = [0; HEADER_BYTES];
        let count = read_up_to(&mut input, &mut bytes).map_err(|error| wrong(error.into()))?;
        if count < HEADER_BYTES {
            let is_ours = bytes.starts_with(b"sidecRec");
            return Err(wrong(if is_ours { Fault::CutOff } else { Fault::NoRecording }));
        }
        let header = Header::decode(&bytes).map_err(wrong)?;
        let at_bytes = HEADER_BYTES as u64;
        Ok(Self { input, header, at_bytes, body: Vec::new(), data_at: 0, has_ended: false })
    }

    /// The header.
    pub const fn header(&self) -> &Header {
        &self.header
    }

    /// The place of the next record in the file.
    pub const fn at_bytes(&self) -> u64 {
        self.at_bytes
    }

    /// The data of the last record; empty unless that was a write of a recording with data.
    pub fn data(&self) -> &[u8] {
        self.body.get(self.data_at..).unwrap_or_default()
    }

    /// Reads the next record; `None` behind the end.
    ///
    /// # Errors
    /// A fault of the file. All records in front of it have been read, and none comes behind it.
    pub fn read(&mut self) -> Result<Option<Record>, RecordingError> {
        if self.has_ended {
            return Ok(None);
        }
        let read = self.read_record();
        match &read {
            Ok(Record::End { .. }) | Err(_) => self.has_ended = true,
            Ok(_) => {}
        }
        let record = read.map_err(|fault| RecordingError { at_bytes: self.at_bytes, fault })?;
        let len_bytes = FRAME_BYTES.saturating_add(self.body.len()) as u64;
        self.at_bytes = self.at_bytes.saturating_add(len_bytes);
        Ok(Some(record))
    }

    fn read_record(&mut self) -> Result<Record, Fault> {
        self.body.clear();
        self.data_at = 0;
        let mut frame = [0; FRAME_BYTES];
        if read_up_to(&mut self.input, &mut frame)? < FRAME_BYTES {
            return Err(Fault::CutOff);
        }
        let (len_bytes, check) = frame.split_first_chunk().ok_or(Fault::Length)?;
        let len_bytes = u32::from_le_bytes(*len_bytes);
        if len_bytes as usize > REQUEST_BYTES.saturating_add(DATA_MAX) {
            return Err(Fault::Length);
        }
        // Grows as bytes arrive: a length alone makes nothing large.
        self.input.by_ref().take(len_bytes.into()).read_to_end(&mut self.body)?;
        if self.body.len() < len_bytes as usize {
            return Err(Fault::CutOff);
        }
        if check != checksum(&self.body).to_le_bytes() {
            return Err(Fault::Check);
        }
        let (record, data_bytes) = Record::decode(&self.body)?;
        self.data_at = self.body.len().saturating_sub(data_bytes);
        if let Record::Request(request) = &record
            && let Some(sum) = request.checksum
            && data_bytes > 0
            && sum != checksum(self.data())
        {
            return Err(Fault::Value("checksum"));
        }
        if matches!(record, Record::End { .. }) && read_up_to(&mut self.input, &mut [0])? > 0 {
            return Err(Fault::Behind);
        }
        Ok(record)
    }
}

/// Reads until `to` is full, or the input ends. Returns the number of bytes.
fn read_up_to(input: &mut impl Read, to: &mut [u8]) -> io::Result<usize> {
    let mut count = 0_usize;
    while let Some(rest) = to.get_mut(count..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(read) => count = count.saturating_add(read),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}
