//! Memory of the host that a queued operation reads or writes after the call that named it has returned.
//!
//! That the memory still exists then is what CUDA asks of its callers, and the emulator cannot know it of ordinary
//! memory: these types are as unsafe as the C interface they serve, and only that.
#![allow(unsafe_code)]

/// Bytes of the host to be read.
#[derive(Debug, Clone, Copy)]
pub struct Bytes {
    address: usize,
    count: usize,
}

impl Bytes {
    /// The `count` bytes at `address`, as a caller of the C interface promised them.
    pub fn at(address: usize, count: usize) -> Bytes {
        Bytes { address, count: if address == 0 { 0 } else { count } }
    }

    /// A copy of what is there now.
    pub fn to_vec(self) -> Vec<u8> {
        self.read(|bytes| bytes.to_vec())
    }

    /// Looks at what is there now.
    pub fn read<R>(self, look: impl FnOnce(&[u8]) -> R) -> R {
        if self.count == 0 {
            return look(&[]);
        }
        // SAFETY: the C interface's caller promises `count` readable bytes there until the operation has run.
        look(unsafe { std::slice::from_raw_parts(self.address as *const u8, self.count) })
    }
}

/// Bytes of the host to be written.
#[derive(Debug, Clone, Copy)]
pub struct BytesMut {
    address: usize,
    count: usize,
}

impl BytesMut {
    /// The `count` bytes at `address`, as a caller of the C interface promised them.
    pub fn at(address: usize, count: usize) -> BytesMut {
        BytesMut { address, count: if address == 0 { 0 } else { count } }
    }

    /// Writes them.
    pub fn write<R>(self, fill: impl FnOnce(&mut [u8]) -> R) -> R {
        if self.count == 0 {
            return fill(&mut []);
        }
        // SAFETY: the C interface's caller promises `count` writable bytes there that it leaves alone until the
        // operation has run.
        fill(unsafe { std::slice::from_raw_parts_mut(self.address as *mut u8, self.count) })
    }
}
