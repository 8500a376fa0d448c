//! The 128 bytes by which ranks find each other.

use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_emulator_link::pointer::Out;

use crate::status::present;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Id([u8; 128]);

impl Id {
    /// One that nobody in this process has, and that no id of a real NCCL looks like.
    pub(crate) fn new() -> Id {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let mut bytes = [0; 128];
        bytes[..16].copy_from_slice(b"phalanx emulated");
        bytes[16..20].copy_from_slice(&std::process::id().to_le_bytes());
        bytes[20..28].copy_from_slice(&LAST.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Id(bytes)
    }

    /// Whether it was made in this process.
    pub(crate) fn is_ours(self) -> bool {
        self.0[..20] == Id::new().0[..20]
    }
}

export! {
    fn ncclGetUniqueId(id: Out<Id>) { present(id.set(Id::new()), "uniqueId") }
}
