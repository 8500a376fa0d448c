//! Where a built library lies.
//!
//! Cargo puts the `cdylib` of a dependency into `target/PROFILE/deps`, with a hash in its name if the package does not
//! come from a path; what is built itself also comes to `target/PROFILE`. Test executables are in `deps`, examples in
//! `examples`, programs in `target/PROFILE`: so a library is beside the executable, in its `deps`, or in its parent's.
//! Doctests run from a folder of their own: for them there is the folder that the package was built in.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Names the folder to take the libraries from, before any other place.
pub const FOLDER: &str = "PHALANX_CUDA_EMULATOR";

/// The file of library `name` (`lib`*name*`.so`, or with a hash behind the name) beside the running executable or
/// test, or in the folder that [`FOLDER`] names. `built` is the `OUT_DIR` of the library's package.
pub fn find(name: &str, built: &str) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return existing(Path::new(&folder), name);
    }
    let executable = std::env::current_exe().ok();
    let beside = executable.iter().flat_map(|path| path.ancestors().skip(1).take(2));
    // target/PROFILE/build/PACKAGE/out
    let profile = Path::new(built).ancestors().nth(3);
    let folders = beside.chain(profile).flat_map(|folder| [folder.join("deps"), folder.to_path_buf()]);
    folders.into_iter().find_map(|folder| existing(&folder, name))
}

fn existing(folder: &Path, name: &str) -> Option<PathBuf> {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let plain = folder.join(format!("{prefix}{name}{suffix}"));
    if plain.is_file() {
        return Some(plain.canonicalize().unwrap_or(plain));
    }
    let begin = format!("{prefix}{name}-");
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let hashed = entries.map(|entry| entry.path()).filter(|path| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.starts_with(&begin) && file.ends_with(suffix)
    });
    let age = |path: &PathBuf| path.metadata().and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    hashed.max_by_key(age)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_with_and_without_a_hash_and_no_other() {
        let folder = std::env::temp_dir().join(format!("phalanx-link-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (begin, end) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
        let file = |name: &str| folder.join(format!("{begin}{name}{end}"));
        std::fs::write(file("other-0123"), "").unwrap();
        assert_eq!(existing(&folder, "one"), None);
        std::fs::write(file("one-0123"), "").unwrap();
        assert_eq!(existing(&folder, "one"), Some(file("one-0123")));
        std::fs::write(file("one"), "").unwrap();
        assert_eq!(existing(&folder, "one").unwrap().file_name(), file("one").file_name());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
