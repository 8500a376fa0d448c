//! [`Events`]: scalars and texts in TensorBoard's files.
//!
//! ```text
//!   record: length u64 | masked crc32c of the length u32 | Event | masked crc32c of the event u32      (all little-endian)
//!   Event:  wall_time 1, step 2, file_version 3, summary 5, session_log 7                              (protocol buffers)
//! ```
//!
//! Source: TensorFlow's `event.proto`, `summary.proto`, `tensor.proto` and the TFRecord format.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// An open event file. [`Events::flush`] and dropping write it to the disk.
#[derive(Debug)]
pub struct Events {
    path: PathBuf,
    file: BufWriter<File>,
}

impl Events {
    /// Creates a file in `folder`, and the folder if it is missing. TensorBoard no longer shows the events of earlier files there.
    ///
    /// # Errors
    ///
    /// The folder or the file cannot be made or written; the text has the path.
    pub fn create(folder: &Path) -> Result<Events, String> {
        Events::resume(folder, 0)
    }

    /// Creates a file beside those of the run so far. TensorBoard no longer shows their events from step `from` on.
    ///
    /// # Errors
    ///
    /// Those of [`Events::create`].
    pub fn resume(folder: &Path, from: u64) -> Result<Events, String> {
        std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let (path, file) = new_file(folder)?;
        let mut events = Events { path, file: BufWriter::new(file) };
        // A `START` makes readers discard the steps from this one on.
        events.event(0, |event| event.bytes(3, b"brain.Event:2"))?;
        events.event(from, |event| event.message(7, |log| log.integer(1, 1)))?;
        events.flush()?;
        Ok(events)
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a point to the curve `tag`.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) -> Result<(), String> {
        self.event(step, |event| {
            event.message(5, |summary| {
                summary.message(1, |point| {
                    point.bytes(1, tag.as_bytes());
                    point.float(2, value as f32);
                });
            });
        })
    }

    /// Adds a text to the series `tag`. TensorBoard reads it as Markdown.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn text(&mut self, tag: &str, step: u64, text: &str) -> Result<(), String> {
        const STRING: u64 = 7;
        const CLASS_TENSOR: u64 = 2;
        self.event(step, |event| {
            event.message(5, |summary| {
                summary.message(1, |point| {
                    point.bytes(1, tag.as_bytes());
                    point.message(8, |tensor| {
                        tensor.integer(1, STRING);
                        // The shape: one dimension of size 1.
                        tensor.message(2, |shape| shape.message(2, |dimension| dimension.integer(1, 1)));
                        tensor.bytes(8, text.as_bytes());
                    });
                    point.message(9, |metadata| {
                        metadata.message(1, |plugin| plugin.bytes(1, b"text"));
                        metadata.integer(4, CLASS_TENSOR);
                    });
                });
            });
        })
    }

    /// Writes all events to the file.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn flush(&mut self) -> Result<(), String> {
        self.file.flush().map_err(|e| format!("{}: {e}", self.path.display()))
    }

    fn event(&mut self, step: u64, fields: impl FnOnce(&mut Proto)) -> Result<(), String> {
        let mut event = Proto::default();
        event.double(1, since_epoch().as_secs_f64());
        event.integer(2, step);
        fields(&mut event);
        let length = (event.0.len() as u64).to_le_bytes();
        let pieces = [&length, &masked(&length)[..], &event.0, &masked(&event.0)];
        self.file.write_all(&pieces.concat()).map_err(|e| format!("{}: {e}", self.path.display()))
    }
}

/// Creates a file under a new name. Readers take files in the order of their names, which begin with the time.
fn new_file(folder: &Path) -> Result<(PathBuf, File), String> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname");
    let host = host.or_else(|_| std::env::var("COMPUTERNAME")).unwrap_or_default();
    let kept = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' };
    let host = match host.trim() {
        "" => "host".to_owned(),
        host => host.chars().map(kept).collect(),
    };
    let name = format!("events.out.tfevents.{:010}.{host}.{}", since_epoch().as_secs(), std::process::id());
    // One process may begin two files within a second.
    for number in 0.. {
        let suffix = if number == 0 { String::new() } else { format!(".{number}") };
        let path = folder.join(format!("{name}{suffix}"));
        match File::create_new(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            made => return made.map_err(|e| format!("{}: {e}", path.display())).map(|file| (path, file)),
        }
    }
    Err(format!("{}: no name is free", folder.display()))
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// An encoded message of protocol buffers.
#[derive(Default)]
struct Proto(Vec<u8>);

impl Proto {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// A field's tag: its number and wire type (0 varint, 1 eight bytes, 2 bytes with their length, 5 four bytes).
    fn key(&mut self, field: u64, wire: u64) {
        self.varint(field << 3 | wire);
    }

    fn integer(&mut self, field: u64, value: u64) {
        self.key(field, 0);
        self.varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
    }

    fn float(&mut self, field: u64, value: f32) {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.key(field, 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
    }

    fn message(&mut self, field: u64, fields: impl FnOnce(&mut Proto)) {
        let mut message = Proto::default();
        fields(&mut message);
        self.bytes(field, &message.0);
    }
}

/// The masked checksum of TFRecord: rotated and shifted, so that a checksum of checksums is no special value.
fn masked(data: &[u8]) -> [u8; 4] {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// CRC-32C (Castagnoli), a byte at a time.
fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc: u32, byte| (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)])
}

/// The CRC of each byte, by the polynomial 0x1edc6f41 with its bits reversed.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of its own for a test.
    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("report-events-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        folder
    }

    /// A file's events; checksums must be right.
    fn records(path: &Path) -> Vec<Vec<u8>> {
        let content = std::fs::read(path).unwrap();
        let (mut rest, mut records) = (&content[..], Vec::new());
        while !rest.is_empty() {
            let (length, after) = rest.split_at(8);
            assert_eq!(after[..4], masked(length));
            let (record, after) =
                after[4..].split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
            assert_eq!(after[..4], masked(record));
            records.push(record.to_vec());
            rest = &after[4..];
        }
        records
    }

    /// Test vectors of RFC 3720, section B.4, and the common check value.
    #[test]
    fn crc32c_equals_published_values() {
        let up: Vec<u8> = (0..32).collect();
        let down: Vec<u8> = (0..32).rev().collect();
        assert_eq!(crc32c(b""), 0);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&up), 0x46dd_794e);
        assert_eq!(crc32c(&down), 0x113f_db5c);
        // What TensorBoard's own reader computes.
        assert_eq!(masked(b"123456789"), 0xc78a_b0e5_u32.to_le_bytes());
    }

    #[test]
    fn an_event_is_the_bytes_that_its_description_says() {
        let folder = folder("bytes");
        let mut events = Events::create(&folder).unwrap();
        events.scalar("loss", 300, 1.5).unwrap();
        events.flush().unwrap();
        let records = records(events.path());
        assert_eq!(records.len(), 3);
        assert_eq!(records[0][9..], *b"\x10\x00\x1a\x0dbrain.Event:2");
        assert_eq!(records[1][9..], [0x10, 0, 0x3a, 2, 8, 1]);
        // The step 300, a summary of 13 bytes with a value of 11: a tag and 1.5.
        assert_eq!(records[2][9..], *b"\x10\xac\x02\x2a\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\xc0\x3f");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_resumed_run_has_a_file_of_its_own() {
        let folder = folder("resume");
        let first = Events::create(&folder).unwrap();
        let second = Events::resume(&folder, 7).unwrap();
        assert_ne!(first.path(), second.path());
        assert!(first.path() < second.path(), "readers sort by name");
        assert_eq!(records(second.path())[1][9..], [0x10, 7, 0x3a, 2, 8, 1]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_error_names_the_path() {
        let file = std::env::temp_dir().join(format!("report-events-file-{}", std::process::id()));
        std::fs::write(&file, "").unwrap();
        let error = Events::create(&file).unwrap_err();
        assert!(error.contains(&file.display().to_string()), "{error}");
        std::fs::remove_file(file).unwrap();
    }
}
