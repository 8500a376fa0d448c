//! Schedules as data: who computes what, in which order.

mod action;

pub use action::{Action, Kind, Schedule};
