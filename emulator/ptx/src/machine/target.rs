//! From an address to the bytes it means.

use super::warp::Warp;
use super::{LOCAL_WINDOW, Machine, Outcome, PARAMETER_WINDOW, RANK_SHIFT, SHARED_WINDOW};
use crate::FaultKind;
use crate::code::{Instruction, Space};
use crate::memory::Contents;

/// The allocation that an instruction met last.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cached {
    space: u32,
    slot: u32,
}

/// What an address is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// An allocation of one of the memories.
    Global {
        space: usize,
        slot: usize,
    },
    /// A block's shared memory.
    Shared {
        block: usize,
    },
    Local,
    Parameter,
}

/// The space of a generic address.
#[inline(always)]
pub(crate) fn space_of(address: u64) -> Space {
    match address >> 56 {
        1 => Space::Shared,
        2 => Space::Local,
        3 => Space::Parameter,
        _ => Space::Global,
    }
}

/// An address of a space from a generic one.
#[inline(always)]
pub(crate) fn within(space: Space, address: u64) -> u64 {
    match space {
        Space::Shared => address.wrapping_sub(SHARED_WINDOW),
        Space::Local => address.wrapping_sub(LOCAL_WINDOW),
        Space::Parameter => address.wrapping_sub(PARAMETER_WINDOW),
        Space::Global | Space::Generic => address,
    }
}

impl Machine<'_> {
    /// Finds the target of `bytes` bytes at an address of a space, and where in its contents they begin.
    #[inline(always)]
    pub(crate) fn find(
        &mut self,
        warp: &Warp,
        at: u32,
        space: Space,
        address: u64,
        bytes: u64,
    ) -> Option<(Target, usize)> {
        match space {
            Space::Global | Space::Generic => {
                let cached = self.cache[at as usize];
                if let Some(space) = self.spaces.get_mut(cached.space as usize)
                    && let Some(allocation) = space.at(cached.slot as usize)
                    && allocation.holds(address, bytes)
                {
                    let target = Target::Global { space: cached.space as usize, slot: cached.slot as usize };
                    return Some((target, allocation.offset(address)));
                }
                self.find_global(at, address, bytes)
            }
            Space::Shared => {
                let (block, offset) = self.shared(warp, address)?;
                let len = self.blocks[block].shared.data.len() as u64;
                (bytes <= len && offset <= len - bytes).then_some((Target::Shared { block }, offset as usize))
            }
            Space::Local => {
                let len = self.program.local_bytes as u64;
                (bytes <= len && address <= len - bytes).then_some((Target::Local, address as usize))
            }
            Space::Parameter => {
                let len = self.parameters.len() as u64;
                (bytes <= len && address <= len - bytes).then_some((Target::Parameter, address as usize))
            }
        }
    }

    /// The block that a shared address is of, and the offset there.
    #[inline(always)]
    pub(crate) fn shared(&self, warp: &Warp, address: u64) -> Option<(usize, u64)> {
        match address >> RANK_SHIFT {
            0 => Some((warp.block, address)),
            rank => {
                let block = (rank - 1) as usize;
                (block < self.blocks.len()).then_some((block, address & ((1 << RANK_SHIFT) - 1)))
            }
        }
    }

    #[cold]
    fn find_global(&mut self, at: u32, address: u64, bytes: u64) -> Option<(Target, usize)> {
        for (number, space) in self.spaces.iter_mut().enumerate() {
            let Some(slot) = space.slot(address, bytes) else { continue };
            self.cache[at as usize] = Cached { space: number as u32, slot: slot as u32 };
            let offset = space.at(slot)?.offset(address);
            return Some((Target::Global { space: number, slot }, offset));
        }
        None
    }

    /// The contents of a target. A kernel's parameters have none.
    #[inline(always)]
    pub(crate) fn contents<'c>(&'c mut self, warp: &'c mut Warp, target: Target) -> Option<&'c mut Contents> {
        match target {
            Target::Global { space, slot } => self.spaces[space].at(slot).map(|a| &mut a.contents),
            Target::Shared { block } => Some(&mut self.blocks[block].shared),
            Target::Local => Some(&mut warp.local),
            Target::Parameter => None,
        }
    }

    /// The fault of an access that `find` did not find.
    #[cold]
    pub(crate) fn outside<T>(
        &self,
        warp: &Warp,
        i: &Instruction,
        lane: usize,
        verb: &str,
        place: (Space, u64, u64),
    ) -> Outcome<T> {
        let (space, address, bytes) = place;
        let what = match space {
            Space::Global | Space::Generic => {
                let owner = self.spaces.iter().find(|s| s.owns(address));
                let near = owner.map(|s| s.near(address)).unwrap_or_default();
                if near.is_empty() { format!(" at {address:#x} outside every allocation") } else { near }
            }
            Space::Shared => {
                let len = self.blocks[warp.block].shared.data.len();
                format!(" at offset {address} of {len} bytes of shared memory")
            }
            Space::Local => {
                format!(" at offset {address} of {} bytes of local memory", self.program.local_bytes)
            }
            Space::Parameter => {
                format!(" at offset {address} of {} bytes of parameters", self.parameters.len())
            }
        };
        self.fault(FaultKind::OutOfBounds, warp, i, lane, format!("{verb} of {bytes} bytes{what}"))
    }

    /// What a target is called, with an offset in it.
    pub(crate) fn name(&self, target: Target, offset: usize) -> String {
        match target {
            Target::Global { space, slot } => {
                let bytes = self.spaces[space].bytes(slot);
                format!("offset {offset} of an allocation of {bytes} bytes")
            }
            Target::Shared { .. } => format!("offset {offset} of shared memory"),
            Target::Local => format!("offset {offset} of local memory"),
            Target::Parameter => format!("offset {offset} of the parameters"),
        }
    }
}
