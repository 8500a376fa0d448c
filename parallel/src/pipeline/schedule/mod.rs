//! Schedules as data: who computes what, in which order.

mod action;
mod asynchronous;
mod error;
mod generate;
mod receipts;
mod simulate;
mod text;
mod transfers;
mod verify;

pub use action::{Action, Kind, Schedule, Transfer};
pub use asynchronous::{Asynchronous, double_buffered, weight_stashing};
pub use error::{Error, Result, Wait};
pub use generate::{NAMES, by_name, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2, zb_v};
pub use receipts::receipts;
pub use simulate::{Costs, Span, Timeline, simulate};
pub use transfers::with_transfers;
pub use verify::verify;
