//! The 128 bytes by which ranks find each other.

use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_emulator_link::pointer::Out;

use crate::relay::port;
use crate::status::present;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Id([u8; 128]);

impl Id {
    /// One that nobody on this machine has, and that no id of a real NCCL looks like.
    pub(crate) fn new() -> Id {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let mut bytes = [0; 128];
        bytes[..16].copy_from_slice(b"phalanx emulated");
        bytes[16..20].copy_from_slice(&std::process::id().to_le_bytes());
        bytes[20..22].copy_from_slice(&port().to_le_bytes());
        bytes[22..30].copy_from_slice(&LAST.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Id(bytes)
    }

    /// Whether it was made in this process.
    pub(crate) fn is_ours(self) -> bool {
        self.0[..22] == Id::new().0[..22]
    }

    /// Whether an emulator has made it, here or in another process.
    pub(crate) fn is_emulated(self) -> bool {
        self.0.starts_with(b"phalanx emulated") && self.port() != 0
    }

    /// Where its process listens.
    pub(crate) fn port(self) -> u16 {
        u16::from_le_bytes([self.0[20], self.0[21]])
    }

    pub(crate) fn bytes(self) -> [u8; 128] {
        self.0
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Id> {
        bytes.try_into().ok().map(Id)
    }
}

export! {
    fn ncclGetUniqueId(id: Out<Id>) { present(id.set(Id::new()), "uniqueId") }
}
