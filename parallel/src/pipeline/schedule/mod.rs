//! Schedules as data: which rank computes what, in which order. Nothing here runs a model.
//!
//! ```text
//! 1F1B, 3 ranks, 5 micro-batches: warm-up, then one forward and one backward in turn, then the cool-down
//!
//! rank 0 | F0 F1 F2             B0--- F3 B1--- F4 B2---    B3---    B4---
//! rank 1 |    F0 F1       B0--- F2 B1--- F3 B2--- F4 B3---    B4---
//! rank 2 |       F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4---
//!
//! generate ──> action <── transfers (adds SEND_F, RECV_F, SEND_B, RECV_B)      one_f_one_b(3, 5) ──> with_transfers ──>
//! asynchronous ──┘  └──── verify, simulate                                     verify ──> ranks::Pipeline
//! ```
//! A schedule is made by a function of [`NAMES`] or by [`replicated`], read from text, or written by hand; [`verify`] checks any, and
//! [`ranks`](super::ranks) runs any that it passes.

mod action;
mod asynchronous;
mod error;
mod generate;
mod simulate;
mod transfers;
mod verify;

pub use action::{Action, ActionKind, Schedule, Transfer};
pub use asynchronous::{
    Asynchronous, common_multiple, double_buffered, double_buffered_over, vertical_sync, vertical_sync_over,
    weight_stashing, weight_stashing_over,
};
pub use error::{Error, Result, Wait};
pub use generate::{NAMES, by_name, gpipe, interleaved, one_f_one_b, replicated, zb_h1, zb_h2, zb_v};
pub use simulate::{Costs, Span, Timeline, simulate};
#[expect(deprecated, reason = "the old name of `acknowledgements`")]
pub use transfers::receipts;
pub use transfers::{acknowledgements, with_transfers};
pub use verify::verify;

/// The former name of [`ActionKind`].
#[deprecated(since = "0.1.0", note = "renamed to `ActionKind`")]
pub type Kind = ActionKind;
