//! Skip connections: values that pass over layers.
//!
//! A layer *stashes* a value, a later one *pops* it. Between stages the value goes straight to the stage that pops it,
//! through no stage between (torchgpipe, section 3.3, where what carries it is called a portal):
//!
//! ```text
//! stage 0   stash ─────┐ lane cpu:0 → cpu:2
//! stage 1   ...        │
//! stage 2   pop   <────┘
//! ```
//! It leaves its device as soon as it is copied and is held by nobody but the cell that will pop it, so that its memory
//! goes as soon as possible.

mod held;
mod name;
mod routes;
mod verify;

pub use held::Skips;
pub use name::{Namespace, Skip, Skippable};
pub use routes::{Route, routes};
pub use verify::verify_skips;
