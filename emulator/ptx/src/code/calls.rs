//! Functions and their calls: where parameters lie, what a call keeps, and the addresses of functions.

use super::Reg;

/// A function that a call can reach.
#[derive(Clone, Debug)]
pub(crate) struct Callee {
    pub(crate) name: String,
    pub(crate) kind: CalleeKind,
    /// Where its parameters lie.
    pub(crate) parameters: Vec<Slot>,
    pub(crate) returns: Vec<Slot>,
    /// Of a function of which each call has a frame.
    pub(crate) frame: Option<Frame>,
}

/// Bytes of a thread's local memory: `offset` from where the register `frame` says (`ZERO` for the beginning).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) frame: Reg,
    pub(crate) offset: u32,
    pub(crate) bytes: u32,
}

/// What a call of a function has for itself: bytes on the thread's stack, and its registers from the first up to the
/// second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    /// Where the bytes begin.
    pub(crate) register: Reg,
    pub(crate) bytes: u32,
    /// What it begins at a multiple of.
    pub(crate) align: u32,
    pub(crate) registers: (Reg, Reg),
}

/// Frames begin and end at multiples of this, or of more.
pub(crate) const FRAME_ALIGN: u32 = 16;

/// Bytes of a thread's stack, if its kernel calls functions that call themselves, or allocates.
pub(crate) const STACK_BYTES: u32 = 1 << 15;

/// What addresses of functions begin with.
const FUNCTION_WINDOW: u64 = 4 << 56;

/// The address of a module's function of this number. Neither it nor one nearby is null.
pub(crate) fn function_address(number: usize) -> u64 {
    FUNCTION_WINDOW | (number as u64 + 1) << 4
}

/// The number of the function at an address.
pub(crate) fn function_number(address: u64) -> Option<usize> {
    let number = (address & !FUNCTION_WINDOW) >> 4;
    (number > 0 && function_address(number as usize - 1) == address).then(|| number as usize - 1)
}

/// What an instruction does with a thread's stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StackOp {
    /// Takes `a` bytes aligned to `b`.
    Allocate,
    Save,
    Restore,
}

/// What carries a function out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CalleeKind {
    /// The instruction it begins at.
    Code(u32),
    Print,
    Assert,
    /// `malloc`, from the memory of the module's device.
    Allocate,
    Free,
    Missing,
}

/// A call: the function, or none for one whose address is in a register, and where the arguments lie.
#[derive(Clone, Debug)]
pub(crate) struct CallSite {
    pub(crate) callee: Option<u32>,
    pub(crate) arguments: Vec<Slot>,
    pub(crate) results: Vec<Slot>,
}
