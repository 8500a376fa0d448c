//! [`Chunk`]: bytes that follow each other in a rank's file, and are written at once.

/// Bytes of a chunk; the last one of a file has fewer.
pub(super) const CHUNK: usize = 4 << 20;

/// A multiple of every usual disk's sectors. What begins at a multiple of it, in memory and in a file, goes to the disk without a copy
/// in the system's cache.
pub(super) const PAGE: usize = 4 << 10;

/// A chunk, in memory that begins at a multiple of [`PAGE`]. The default one has no memory.
#[derive(Debug, Default)]
pub(super) struct Chunk {
    memory: Vec<u8>,
    start: usize,
    /// Of the blocks that end in it.
    pub(super) checksums: Vec<u64>,
}

impl Chunk {
    /// An empty one with its memory.
    pub(super) fn with_room() -> Chunk {
        let mut memory: Vec<u8> = Vec::with_capacity(CHUNK + PAGE);
        let start = memory.as_ptr().align_offset(PAGE);
        memory.resize(start, 0);
        Chunk { memory, start, checksums: Vec::new() }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..]
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes().len() == CHUNK
    }

    /// Takes bytes until it is full; the others.
    pub(super) fn fill<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (now, later) = bytes.split_at(bytes.len().min(CHUNK - self.bytes().len()));
        self.memory.extend_from_slice(now);
        later
    }

    pub(super) fn clear(&mut self) {
        self.memory.truncate(self.start);
        self.checksums.clear();
    }
}
