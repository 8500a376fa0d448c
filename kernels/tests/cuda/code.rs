//! What a program's machine code is known by.

use std::hash::{DefaultHasher, Hash, Hasher};

use phalanx_tensor::cuda::{self, Target};

/// A hash of all that decides a program's code for a compute capability: 64 bits in hexadecimal. Another version of the standard library
/// may have other hashes; then nothing is known.
///
/// # Errors
/// If there is no compiler.
pub fn hash(name: &str, text: &str, capability: u32) -> Result<String, String> {
    let mut hasher = DefaultHasher::new();
    cuda::compile_key(name, text, Target::Cubin(capability))?.hash(&mut hasher);
    Ok(format!("{:016x}", hasher.finish()))
}
