//! What the emulated CUDA libraries share: how a function is exported ([`export!`](crate::export)) and takes pointers
//! and handles from C ([`mod@pointer`], [`handle`]), where the built libraries lie ([`library`]), and how the
//! emulated cuBLASLt and NCCL reach the emulated driver's memory and streams ([`driver`]).
//!
//! Nothing here knows what a kernel or a matrix is.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub mod driver;
pub mod handle;
pub mod library;
pub mod pointer;

/// Locks a mutex, even if a thread has panicked under the lock: a panic is a bug of the emulator, which is caught
/// where C calls in and reported there, and the program goes on. (A helper of the emulator's own, since it uses no
/// other package of this repository.)
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Exports functions under their names with the C calling convention. The bodies are safe code: what comes from C
/// as a pointer is taken as one of [`pointer`](crate::pointer)'s types.
///
/// ```
/// phalanx_emulator_link::export! {
///     fn example_double(x: i32) -> i32 { 2 * x }
/// }
/// assert_eq!(example_double(21), 42);
/// ```
#[macro_export]
macro_rules! export {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {$(
        $(#[$meta])*
        // SAFETY: the name is that of a C function with this signature, and no other function of the library has it.
        #[allow(unsafe_code, missing_docs, non_snake_case, unused_variables, clippy::too_many_arguments)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $type),*) -> $result $body
    )*};
}
