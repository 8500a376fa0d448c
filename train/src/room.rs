//! [`room`]: whether something fits into this machine's memory at all, asked before any of it is taken.

use crate::{Error, Result};

/// Refuses what needs more memory than this machine has: named things and their bytes. Where the system does not tell, everything fits.
///
/// # Errors
/// The largest of them, and what there is.
pub fn room(things: &[(&str, f64)]) -> Result<()> {
    let Some(room) = memory_bytes() else { return Ok(()) };
    let all: f64 = things.iter().map(|(_, bytes)| bytes).sum();
    if all <= room {
        return Ok(());
    }
    let told: Vec<String> = things.iter().map(|(what, bytes)| format!("{what} {bytes:.2e}")).collect();
    Err(Error::Config(format!("wanted bytes for {}, and this machine has {room:.2e}", told.join(", "))))
}

/// All memory of this machine.
fn memory_bytes() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? * 1024.0)
}
