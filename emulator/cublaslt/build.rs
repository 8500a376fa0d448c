//! Gives the library the name that programs ask the loader for. Its file keeps a name of its own, so it serves only
//! those who have loaded it by its path.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcublasLt.so");
}
