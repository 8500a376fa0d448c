//! What a launch touched, for those who look for missing waits.

use phalanx_ptx::{Report, Touched};

use crate::access::Access;

/// The bytes of global memory that a launch read and wrote.
pub(crate) fn accesses(report: &Report) -> Vec<Access> {
    let access = |t: &Touched| Access { start: t.start, end: t.end, written: t.written };
    report.touched.iter().map(access).collect()
}
