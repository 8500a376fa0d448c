//! How the processes of a run find each other, and prove that they belong together.
//!
//! ```text
//! rendezvous   every rank gets a socket to every other
//!    |-- reception    takes all connections at once, and drops those that are no ranks
//!    |      |-- handshake   both ends prove that they are of the same run
//!    |-- master       where rank 0 listens
//! opening        whether a connection has TLS
//! stream         a connection, in the clear or with TLS (feature `tls`)
//! text      ranks by their numbers, and what comes from the network, for people
//! ```
//!
//! It knows no tensors: the launcher uses this crate, and stays a small build.
#![forbid(unsafe_code)]

mod handshake;
mod introduction;
mod lobby;
mod master;
mod member;
mod node;
mod opening;
mod reception;
mod rendezvous;
mod store;
#[cfg(test)]
mod store_tests;
mod stream;
#[cfg(test)]
mod tests;
/// The same over TLS.
#[cfg(all(test, feature = "tls"))]
#[allow(clippy::duplicate_mod)]
#[path = "tests.rs"]
mod tests_with_tls;
mod text;
#[cfg(feature = "tls")]
mod tls;

pub use handshake::{Credentials, Hello, Kind, Session, greet};
pub use master::Master;
pub use member::{Member, Met};
pub use node::{Absent, Node};
pub use rendezvous::{Streams, rendezvous};
pub use store::Store;
pub use stream::{Reader, Stream, Writer, detect_vanished};
pub use text::{clean, name_ranks};

/// Why processes do not meet. The message names the rank that says so, or the variable that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(String);

/// The results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<String> for Error {
    fn from(why: String) -> Error {
        Error(why)
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct Readme;
