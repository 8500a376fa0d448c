//! The flight recorder: what each rank did last, for runs that hang or fail.
//!
//! ```text
//! comm, pipeline ──► recorder (always on)  ring of the last 1,000 operations of a rank
//!                       │ a failure, a request
//!                       v
//!                    dump (rank-I.jsonl)   one file a rank
//!                       │ later, on any machine
//!                       v
//!                    dumps ──► findings ──► picture     `flight DIR`
//! ```
//!
//! A communicator notes every call, with its place among the calls of its group, and a pipeline every action. When a call fails, a rank is
//! late or lost, or a rank fails, every rank writes its ring into a folder: `PHALANX_FLIGHT_DIR`, or the one of
//! [`FlightRecorder::set_folder`]. [`explain`] compares the files. Calls of one group have the same number on all of its ranks, so the first
//! number at which ranks differ, or which some have not reached, is where the run went wrong.
//!
//! The idea is that of PyTorch's flight recorder of NCCL calls.

mod dump;
mod dumps;
mod findings;
mod picture;
mod recorder;

use std::path::Path;

use phalanx_tensor::io::atomic;

pub use dump::{Dump, Entry, Head};
pub use dumps::Dumps;
pub use findings::{Disagreement, Findings, Wait};
pub use picture::picture;
pub use recorder::{FlightRecorder, OPERATIONS_MAX, dump_all};
pub(crate) use recorder::{Operation, What};

use crate::Result;

/// Reads the dumps of a folder, writes the picture `flight.svg` beside them, and returns what they say as text. If the picture cannot be
/// written, the text says so.
///
/// # Errors
/// If the folder has no dump.
pub fn explain(folder: &Path) -> Result<String> {
    let dumps = Dumps::read(folder)?;
    let findings = Findings::of(&dumps);
    let path = folder.join("flight.svg");
    let svg = picture(&findings, &dumps);
    let drawn = match atomic::write(&path, |file| file.write_all(svg.as_bytes())) {
        Ok(()) => format!("picture: {}\n", path.display()),
        Err(error) => format!("no picture: {error}\n"),
    };
    Ok(findings.text() + &drawn)
}
