//! Runs the PTX that NVRTC and nvcc emit, on the CPU, and checks every access that a kernel makes.
//!
//! ```
//! use std::sync::Arc;
//! use phalanx_ptx::{Checks, Launch, Loaded, Memory, Module, launch};
//!
//! let ptx = r#"
//! .version 9.0
//! .target sm_80
//! .address_size 64
//! .visible .entry twice(.param .u64 x) {
//!     .reg .b32 %r<4>; .reg .b64 %rd<4>;
//!     ld.param.u64 %rd1, [x];
//!     mov.u32 %r1, %tid.x;
//!     mul.wide.u32 %rd2, %r1, 4;
//!     add.s64 %rd3, %rd1, %rd2;
//!     ld.global.u32 %r2, [%rd3];
//!     shl.b32 %r3, %r2, 1;
//!     st.global.u32 [%rd3], %r3;
//!     ret;
//! }"#;
//! let memory = Memory::new(1 << 20);
//! let x = memory.allocate(128)?;
//! memory.write(x, &[1; 128])?;
//! let module = Loaded::new(Arc::new(Module::parse(ptx)?), &memory)?;
//! let one_warp = Launch { grid: [1, 1, 1], block: [32, 1, 1], shared_bytes: 0, cluster: [1, 1, 1] };
//! launch(&module, "twice", &[&memory], &one_warp, &x.to_le_bytes(), &Checks::default())?;
//! let mut result = [0; 128];
//! memory.read(x, &mut result)?;
//! assert_eq!(result, [2; 128]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The way of a kernel: [`Module::parse`] decodes every instruction once into a compact form whose operands are all
//! registers; [`Loaded`] gives the module's variables addresses in a [`Memory`]; [`launch`] runs the blocks one after
//! the other, the warps of a block in turn, the 32 lanes of a warp together. Lanes that took different ways join
//! again because those at the lowest instruction always run first.

#![forbid(unsafe_code)]
// A lane is an index of several registers at once.
#![allow(clippy::needless_range_loop)]

mod allowed;
mod code;
mod counters;
mod decode;
pub mod device;
mod fault;
mod lanes;
mod launch;
mod machine;
mod memory;
mod module;
mod shared_variable;
mod syntax;
mod tensor_map;

pub use allowed::{AllowedRace, RacePlace};
pub use counters::{Balance, Counters, SECTOR_BYTES, Traffic};
pub use fault::{Fault, FaultKind, Location, ParseError};
pub use launch::{Checks, Launch, Report, Schedule, Touched, for_each_seed, launch, launch_cooperative};
pub use memory::{Memory, OutOfMemory, Placement};
pub use module::{AddressOf, Kernel, Loaded, Module, Parameter, Variable};
pub use tensor_map::{Fill, Swizzle, TensorMap, TensorMapError, TensorType};
