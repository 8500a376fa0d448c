//! [`room`]: whether something fits into this machine's memory at all, asked before any of it is taken.

use crate::machine::memory_bytes;
use crate::{Error, Result};

/// Refuses what needs more memory than this machine has: named things and their bytes. Where the system does not tell, everything fits.
///
/// # Errors
/// The largest of them, and what there is.
pub fn room(things: &[(&str, f64)]) -> Result<()> {
    let Some(room) = memory_bytes().map(|bytes| bytes as f64) else { return Ok(()) };
    let all: f64 = things.iter().map(|(_, bytes)| bytes).sum();
    if all <= room {
        return Ok(());
    }
    let told: Vec<String> = things.iter().map(|(what, bytes)| format!("{what} {bytes:.2e}")).collect();
    Err(Error::Config(format!("wanted bytes for {}, and this machine has {room:.2e}", told.join(", "))))
}
