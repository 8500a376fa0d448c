//! What the emulated CUDA libraries share: how a function is exported and takes pointers from C ([`mod@pointer`],
//! [`export!`](crate::export)), where the built libraries lie ([`library`]), and how the emulated cuBLASLt and NCCL reach
//! the emulated driver's memory and streams ([`driver`]).
//!
//! Nothing here knows what a kernel or a matrix is.

pub mod driver;
pub mod handle;
pub mod library;
pub mod pointer;

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
