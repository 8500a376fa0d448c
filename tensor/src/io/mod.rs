//! Tensors in files: safetensors, NumPy's npy, and atomic replacement of any file.
//!
//! All formats are little-endian, and so must the machine be.

pub mod atomic;
mod map;
mod npy;
mod safetensors;

pub use npy::{load_npy, load_npy_as, read_npy, save_npy, write_npy};
pub use safetensors::{SafeTensors, save_safetensors};

const _: () = assert!(cfg!(target_endian = "little"), "files are little-endian");
