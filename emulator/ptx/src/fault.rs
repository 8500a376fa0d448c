//! What can be wrong with a module, a launch, or an access, and where it happened.

use std::fmt;

/// Text that is no PTX, or PTX that names what there is not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("ptx line {line}: {what}")]
pub struct ParseError {
    /// The line of the PTX text, from 1.
    pub line: u32,
    /// What was found, and what was wanted.
    pub what: String,
}

/// A place in the source that PTX was compiled from, as its `.loc` directives say.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// The file, as the compiler was told its name.
    pub file: String,
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1; 0 if unknown.
    pub column: u32,
    /// Where the function of this line was inlined, outwards.
    pub inlined_at: Option<Box<Location>>,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)?;
        match &self.inlined_at {
            Some(outer) => write!(f, " (inlined at {outer})"),
            None => Ok(()),
        }
    }
}

/// The kinds of faults.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// An address outside every allocation, variable, window or parameter.
    OutOfBounds,
    /// An address that is no multiple of the access's size.
    Misaligned,
    /// A read of bytes that nothing has written.
    Uninitialised,
    /// A read of bytes that an asynchronous copy has still to write, or of registers that a matrix product may still
    /// write.
    Pending,
    /// Threads of a block touch the same bytes of shared memory, one writes, and nothing orders them.
    SharedRace,
    /// Threads touch the same bytes of global memory, one writes, and nothing orders them.
    GlobalRace,
    /// A barrier that some threads of the block do not reach.
    DivergentBarrier,
    /// A shuffle, vote or the like that a lane named in its mask does not reach, or what depends on what a shuffle reads from an absent lane.
    DivergentShuffle,
    /// Threads that wait for what cannot come.
    Deadlock,
    /// A block that runs on and on ([`crate::Checks::instructions_max`]).
    Endless,
    /// Registers or shared memory that an asynchronous instruction uses without the fence that makes earlier writes
    /// known to it: `wgmma.fence`, or `fence.proxy.async`.
    MissingFence,
    /// A launch that a device would refuse.
    BadLaunch,
    /// The kernel executed `trap`.
    Trap,
    /// An `assert` of the kernel failed.
    Assert,
    /// A call through a pointer that is null, or that is not the address of a function with these parameters.
    InvalidCall,
    /// Something that the interpreter does not do.
    Unsupported,
    /// An address given to `free` that is no allocation's start.
    InvalidFree,
    /// An operand that PTX leaves undefined: a bad descriptor, mask, barrier number or the like.
    InvalidOperand,
}

impl FaultKind {
    fn title(self) -> &'static str {
        match self {
            FaultKind::OutOfBounds => "illegal access",
            FaultKind::Misaligned => "misaligned access",
            FaultKind::Uninitialised => "uninitialised read",
            FaultKind::Pending => "access to what is still under way",
            FaultKind::SharedRace => "race in shared memory",
            FaultKind::GlobalRace => "race in global memory",
            FaultKind::DivergentBarrier => "divergent barrier",
            FaultKind::DivergentShuffle => "divergent warp operation",
            FaultKind::Deadlock => "deadlock",
            FaultKind::Endless => "no end",
            FaultKind::MissingFence => "missing fence",
            FaultKind::BadLaunch => "launch refused",
            FaultKind::Trap => "trap",
            FaultKind::Assert => "assertion failed",
            FaultKind::InvalidCall => "invalid call",
            FaultKind::Unsupported => "unsupported",
            FaultKind::InvalidFree => "invalid free",
            FaultKind::InvalidOperand => "invalid operand",
        }
    }
}

/// Something that a kernel, or a call into [`crate::Memory`], must not do.
///
/// Its text is one line: `illegal access: read of 4 bytes at offset 4096 of an allocation of 4096 bytes, kernel
/// "gelu" at gelu.cu:17, block (3, 0, 0), thread (31, 0, 0)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What kind of fault it is.
    pub kind: FaultKind,
    /// The kernel; empty where none was running.
    pub kernel: String,
    /// Where in the source, if the PTX says so.
    pub at: Option<Box<Location>>,
    /// The line of the PTX text, from 1; 0 where no instruction was running.
    pub ptx_line: u32,
    /// The block's index.
    pub block: [u32; 3],
    /// The thread's index in its block.
    pub thread: [u32; 3],
    /// What happened; of a race also the other thread, and where its access was.
    pub message: String,
    /// Of a launch with a seeded order: the seed that repeats it ([`crate::Schedule::Seeded`]).
    pub seed: Option<u64>,
}

impl Fault {
    /// A fault outside of any kernel.
    pub(crate) fn outside(kind: FaultKind, message: impl Into<String>) -> Fault {
        let (block, thread) = ([0; 3], [0; 3]);
        let (kernel, at, ptx_line, seed) = (String::new(), None, 0, None);
        Fault { kind, kernel, at, ptx_line, block, thread, message: message.into(), seed }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.title(), self.message)?;
        if !self.kernel.is_empty() {
            write!(f, ", kernel {:?}", self.kernel)?;
        }
        let comma = if self.kernel.is_empty() { "," } else { "" };
        match (&self.at, self.ptx_line) {
            (Some(at), _) => write!(f, "{comma} at {at}")?,
            (None, 0) => return Ok(()),
            (None, line) => write!(f, "{comma} at PTX line {line}")?,
        }
        let ([bx, by, bz], [tx, ty, tz]) = (self.block, self.thread);
        write!(f, ", block ({bx}, {by}, {bz}), thread ({tx}, {ty}, {tz})")?;
        match self.seed {
            Some(seed) => write!(f, ", in the order of seed {seed}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Fault {}
