//! What the emulated CUDA libraries share: how a function is exported ([`export!`](crate::export)) and takes pointers
//! and handles from C ([`mod@pointer`], [`handle`]), how its call ends ([`status`]), where the built libraries lie
//! ([`library`]), what one does when the process ends ([`exit`]), and how the emulated cuBLASLt and NCCL reach the emulated driver's memory and streams ([`driver`]).
//!
//! Nothing here knows what a kernel or a matrix is.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub mod driver;
pub mod exit;
pub mod handle;
pub mod library;
pub mod pointer;
pub mod status;

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
///
/// Most functions of a CUDA library return a status. After `answered by FUNCTION;` the bodies give a `Result<()>`, and
/// `FUNCTION`, called with the exported name and the body, makes it the status.
///
/// ```
/// fn answer(name: &str, body: impl FnOnce() -> Result<(), i32>) -> i32 {
///     body().map_or_else(|status| status, |()| 0)
/// }
/// phalanx_emulator_link::export! {
///     answered by answer;
///     fn example_positive(x: i32) { if x > 0 { Ok(()) } else { Err(7) } }
/// }
/// assert_eq!((example_positive(1), example_positive(-1)), (0, 7));
/// ```
#[macro_export]
macro_rules! export {
    (answered by $answer:path; $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $crate::export! { $(fn $name($($arg: $type),*) -> i32 { $answer(stringify!($name), || $body) })* }
    };
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {$(
        $(#[$meta])*
        // SAFETY: the name is that of a C function with this signature, and no other function of the library has it.
        #[allow(unsafe_code, missing_docs, non_snake_case, unused_variables, clippy::too_many_arguments)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $type),*) -> $result $body
    )*};
}
