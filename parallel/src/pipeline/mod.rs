//! Pipelines: models deeper than one device, as one process over several devices ([`gpipe`]) and over ranks ([`ranks`]).

pub mod gpipe;
pub mod ranks;
pub mod schedule;
