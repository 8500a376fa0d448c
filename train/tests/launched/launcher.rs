//! `phalanx-launch` beside this test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The launcher in the profile of this test, which is built if need be.
pub fn launcher() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let folder = test.parent().and_then(Path::parent).unwrap();
        let profile = match folder.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev",
            named => named,
        };
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--package", "phalanx-launch", "--profile", profile, "--target-dir"]);
        build.arg(folder.parent().unwrap()).current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(build.status().unwrap().success(), "the launcher builds");
        folder.join("phalanx-launch")
    })
}
