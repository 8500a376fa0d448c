//! Pipelines: models deeper than one device, as one process over several devices ([`gpipe`]) and over ranks ([`ranks`]).

pub mod gpipe;
pub mod planner;
pub mod ranks;
pub mod schedule;
