//! Storage, layouts, dtypes, devices, streams, memory ledger and random draws.

mod pool;

pub use pool::Pool;
