//! What a library does when the process ends.
#![allow(unsafe_code)]

use std::ffi::c_int;

// SAFETY: the C library has this function with this signature (C11, 7.22.4.2).
unsafe extern "C" {
    safe fn atexit(function: extern "C" fn()) -> c_int;
}

/// Calls a function when the process ends by itself: at the end of `main`, or by `exit`.
pub fn at_exit(function: extern "C" fn()) {
    // It says whether there was room for the function: 32 are always.
    let _ = atexit(function);
}
