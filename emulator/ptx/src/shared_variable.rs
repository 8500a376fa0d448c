//! The variables of shared memory. An address has the number of the one that it was derived from, so an access that
//! leaves a variable is found although the next one begins right behind it.
//!
//! ```text
//! shared address   bits 18..24: the number of the variable   bits 0..18: the offset in the block's shared memory
//! ```
//!
//! Matrix descriptors keep only the offset, so the number 0 stands for no variable: such an address may be of any byte.

/// Bits of a shared address below the number of its variable.
const VARIABLE_SHIFT: u32 = 18;
/// Numbers that there are.
const NUMBERS: usize = 64;
/// The number of the dynamic shared memory.
pub(crate) const DYNAMIC: u32 = NUMBERS as u32 - 1;

/// A variable in shared memory.
#[derive(Debug)]
pub(crate) struct SharedVariable {
    pub(crate) name: String,
    pub(crate) start: u32,
    pub(crate) bytes: u32,
}

/// The address of an offset in the variable of a number.
pub(crate) fn address(number: u32, offset: u32) -> u32 {
    number << VARIABLE_SHIFT | offset
}

/// The number of an address's variable.
#[inline(always)]
pub(crate) fn number(address: u64) -> usize {
    (address >> VARIABLE_SHIFT) as usize % NUMBERS
}

/// An address's offset in shared memory.
#[inline(always)]
pub(crate) fn offset(address: u64) -> u64 {
    address & ((1 << VARIABLE_SHIFT) - 1)
}

/// Where each variable begins and ends, by its number, in so many bytes of shared memory.
pub(crate) fn ranges(variables: &[SharedVariable], dynamic_start: u32, bytes: u32) -> Vec<(u64, u64)> {
    let mut ranges = vec![(0, bytes as u64); NUMBERS];
    ranges[DYNAMIC as usize].0 = dynamic_start as u64;
    for (range, found) in ranges[1..DYNAMIC as usize].iter_mut().zip(variables) {
        *range = (found.start as u64, (found.start + found.bytes) as u64);
    }
    ranges
}

/// Says where an address lies, relative to its variable.
pub(crate) fn beside(address: u64, ranges: &[(u64, u64)], variables: &[SharedVariable]) -> String {
    let (mut number, mut offset) = (number(address), offset(address) as i64);
    if offset >> (VARIABLE_SHIFT - 1) != 0 && number + 1 < NUMBERS {
        // Before the first byte of a variable at the offset 0.
        (number, offset) = (number + 1, offset - (1 << VARIABLE_SHIFT));
    }
    let (start, end) = ranges[number];
    let name = match number.checked_sub(1).map(|at| variables.get(at)) {
        Some(Some(variable)) if number != DYNAMIC as usize => format!(", variable `{}`", variable.name),
        _ if number == DYNAMIC as usize => ", the dynamic part".into(),
        _ => String::new(),
    };
    format!(
        " at offset {} of {} bytes of shared memory{name}",
        offset - start as i64,
        end.saturating_sub(start)
    )
}
